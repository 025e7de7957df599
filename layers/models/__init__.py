"""Reference models: plain ``torch.nn.Module`` classes that know nothing of distconv."""
