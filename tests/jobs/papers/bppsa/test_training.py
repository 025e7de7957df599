"""Training by scan against training by autograd."""

from __future__ import annotations

import pytest

from distconv.jobs.papers.bppsa import training
from tests.jobs.images import image_files


@pytest.mark.long
def test_a_network_on_images_learns_by_scan_as_by_autograd(tmp_path):
    image_files.write_cifar(tmp_path, train=8, test=4)
    rows = training.table(tmp_path, iterations=2, batch=4)
    assert [row["iteration"] for row in rows] == [1, 2, "test"]
    for row in rows:
        assert row["scan"] == pytest.approx(row["autograd"], rel=1e-5)
