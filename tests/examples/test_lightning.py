"""Callbacks of Lightning with the strategy of examples/classify_lightning.py: they act as in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distconv as dc
from tests.distconv.layouts import normal

lightning = pytest.importorskip("lightning.pytorch", reason="needs the package lightning")
callbacks = pytest.importorskip("lightning.pytorch.callbacks", reason="needs the package lightning")
pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "classify_lightning.py"
PATIENCE, LARGEST, RATE = 2, 30, 0.3
IMAGES, LABELS = normal(12, 1, 7, 6, seed=1), torch.arange(12) % 3
"""The first eight train, the others are held out."""


def layers() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Linear(16, 3)).double()  # fmt: skip


def expected_run() -> tuple[int, float, dict[str, torch.Tensor]]:
    """The last epoch, the best held-out loss, and its weights, by a loop of torch."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    best, waited, state = float("inf"), 0, {}
    for epoch in range(LARGEST):  # noqa: B007
        for part in (slice(0, 4), slice(4, 8)):
            optimizer.zero_grad()
            F.cross_entropy(model(IMAGES[part]), LABELS[part]).backward()
            optimizer.step()
        with torch.no_grad():
            value = float(F.cross_entropy(model(IMAGES[8:]), LABELS[8:]))
        waited += 1
        if value < best:
            best, waited, state = value, 0, {name: each.clone() for name, each in model.state_dict().items()}
        if waited == PATIENCE:
            break
    return epoch, best, state


@pytest.mark.parametrize("as_number", [False, True])
def test_early_stopping_and_the_best_checkpoint_are_those_of_one_process(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_number: bool
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--grid", f"h={comm.size}"])
    example: dict[str, Any] = {"__name__": "example"}
    definitions, found, _ = EXAMPLE.read_text().partition("lightning.seed_everything(0)")
    assert found
    exec(compile(definitions, str(EXAMPLE), "exec"), example)
    rank_zero_only, grid = example["rank_zero_only"], example["grid"]
    monkeypatch.setattr(rank_zero_only, "rank", comm.rank)

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = layers()

        def configure_model(self) -> None:
            self.model = dc.parallelize(self.model, grid)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), RATE)

        def loss(self, batch: Any) -> Any:
            return F.cross_entropy(self.model(dc.scatter(batch[0], grid)), dc.scatter(batch[1], grid))

        def training_step(self, batch: Any, _: int) -> Any:
            return self.loss(batch)

        def validation_step(self, batch: Any, _: int) -> None:
            loss = self.loss(batch)
            self.log("held_out", loss.item() if as_number else loss, batch_size=len(batch[0]))

    stopping = callbacks.EarlyStopping(monitor="held_out", patience=PATIENCE)
    saving = callbacks.ModelCheckpoint(shared_tmp_path, monitor="held_out")
    trainer = lightning.Trainer(
        strategy=example["OverGrid"](), devices=1, max_epochs=LARGEST, logger=False, callbacks=[stopping, saving],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    parts = TensorDataset(IMAGES[:8], LABELS[:8]), TensorDataset(IMAGES[8:], LABELS[8:])
    trainer.fit(Module(), *(DataLoader(part, 4) for part in parts))
    last, best, state = expected_run()
    assert 0 < last < LARGEST - 1
    assert stopping.stopped_epoch == last and float(saving.best_model_score) == pytest.approx(best, rel=1e-6)
    assert len(set(comm.allgather((saving.best_model_path, trainer.current_epoch)))) == 1
    stored = torch.load(saving.best_model_path, weights_only=False)["state_dict"]
    for name, value in state.items():
        torch.testing.assert_close(stored[f"model.{name}"], value, rtol=1e-10, atol=1e-12)
