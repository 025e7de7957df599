"""The pages of ``docs/`` and the README: their code runs, their commands are accepted, and they make a site."""
