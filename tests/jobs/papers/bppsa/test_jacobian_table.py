"""Table 1: the paper's exact counts, and the time of autograd."""

from __future__ import annotations

import pytest
import torch

from distconv.jobs.papers.bppsa import jacobian_table


@pytest.mark.long
def test_table_1_has_the_papers_counts():
    rows = {row["operator"]: row for row in jacobian_table.table(columns=2)}
    assert rows["convolution"]["nonzeros"] == 1_696_512
    assert (rows["convolution"]["rows"], rows["convolution"]["columns"]) == (3072, 65536)
    for operator, (sparsity, _) in jacobian_table.PUBLISHED.items():
        assert f"{rows[operator]['sparsity']:.5f}" == f"{sparsity:.5f}"
    # 3.3: 768 MB as a full matrix, 6.5 MB of non-zeros, in 2^20 bytes.
    assert rows["convolution"]["dense_bytes"] == 768 * 2**20
    assert f"{rows['convolution']['value_bytes'] / 2**20:.1f}" == "6.5"
    assert rows["convolution"]["index_bytes"] == 8 * (1_696_512 + 3073)


def test_autograds_time_is_that_of_all_columns():
    calls = []

    def function(x):
        y = 2 * x
        y.register_hook(lambda g: calls.append(int(g.flatten().argmax())))
        return y

    assert jacobian_table.by_columns(function, torch.ones(1, 10), 4) > 0
    assert calls == [0, 3, 6, 9]
