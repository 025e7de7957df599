"""Networks written from their papers: over a grid they compute the same as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.layers.models.paper_networks.networks import PAPERS
from tests.layers.models.test_third_party import compare


@pytest.mark.long
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.usefixtures("fallback")  # GraphCast embeds its edges, which are not scattered
@pytest.mark.filterwarnings("ignore:.*F.linear of a plain tensor:distconv.ReplicationWarning")
def test_a_network_of_a_paper_takes_the_step_of_one_process(comm: Any, name: str) -> None:
    compare(comm, PAPERS[name])
