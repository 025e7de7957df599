"""ClimaX and the grid parts of GraphCast: fields on a map of latitudes and longitudes."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn


class ClimaX(nn.Module):
    """Source: Nguyen et al. 2023, ClimaX: a foundation model for weather and climate, section 3 and figure 2."""

    def __init__(
        self, size: tuple[int, int] = (16, 24), variables: int = 3, patch: int = 4, width: int = 16, depth: int = 2
    ) -> None:
        super().__init__()
        self.patch, self.variables = patch, variables
        self.embeddings = nn.ModuleList(nn.Conv2d(1, width, patch, stride=patch) for _ in range(variables))
        self.of_variable = nn.Parameter(0.1 * torch.randn(1, variables, 1, width))
        self.query = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.aggregate = nn.MultiheadAttention(width, 2, batch_first=True)
        self.of_position = nn.Parameter(0.1 * torch.randn(1, size[0] // patch * (size[1] // patch), width))
        self.of_lead_time = nn.Linear(1, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, variables * patch**2))

    def forward(self, x: torch.Tensor, lead_time: torch.Tensor) -> torch.Tensor:
        """Return the fields (N, variables, H, W) that a lead time (N) after those of ``x`` are expected."""
        n, _, height, width = x.shape
        tokens = [embed(x[:, i : i + 1]).flatten(2).transpose(1, 2) for i, embed in enumerate(self.embeddings)]
        each = torch.stack(tokens, dim=1) + self.of_variable  # (N, variables, patches, width)
        places = each.shape[2]
        of_places = each.transpose(1, 2).reshape(n * places, self.variables, -1)
        y = self.aggregate(self.query.expand(n * places, -1, -1), of_places, of_places, need_weights=False)[0]
        y = y.reshape(n, places, -1) + self.of_position + self.of_lead_time(lead_time[:, None]).unsqueeze(1)
        for block in self.blocks:
            y = block(y)
        y = self.head(self.norm(y)).view(n, height // self.patch, width // self.patch, self.patch, self.patch, -1)
        return y.permute(0, 5, 1, 3, 2, 4).reshape(n, self.variables, height, width)


def _mlp(inputs: int, width: int, outputs: int | None = None) -> nn.Sequential:
    last = [nn.LayerNorm(width)] if outputs is None else []
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs or width), *last)


class _Interaction(nn.Module):
    """A step of an interaction network between two sets of nodes (equations 7 to 9): edges, their sums, nodes."""

    def __init__(self, senders: torch.Tensor, receivers: torch.Tensor, width: int) -> None:
        super().__init__()
        self.register_buffer("senders", senders)
        self.register_buffer("receivers", receivers)
        self.edge, self.node = _mlp(3 * width, width), _mlp(2 * width, width)

    def forward(self, sending: torch.Tensor, receiving: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return the receiving nodes (N, nodes, width)."""
        ends = sending.index_select(1, self.senders), receiving.index_select(1, self.receivers)
        messages = self.edge(torch.cat([edges, *ends], dim=2))
        total = torch.zeros_like(receiving).index_add(1, self.receivers, messages)
        return receiving + cast(torch.Tensor, self.node(torch.cat([receiving, total], dim=2)))


class GraphCast(nn.Module):
    """Source: Lam et al. 2023, GraphCast: learning skillful medium-range global weather forecasting, section 3.

    The mesh is a coarser map here, and each node of the map is connected to the four nodes of the mesh around it.
    """

    def __init__(self, size: tuple[int, int] = (12, 16), variables: int = 3, coarse: int = 4, width: int = 8) -> None:
        super().__init__()
        rows, columns = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
        mesh = size[0] // coarse, size[1] // coarse
        near = [
            ((rows // coarse + i).clamp(max=mesh[0] - 1) * mesh[1] + (columns // coarse + j) % mesh[1]).flatten()
            for i in (0, 1)
            for j in (0, 1)
        ]
        on_grid, on_mesh = torch.arange(rows.numel()).repeat(4), torch.cat(near)
        nodes = torch.arange(mesh[0] * mesh[1])
        self.embed_grid, self.embed_edges = _mlp(variables, width), _mlp(4, width)
        self.of_mesh = nn.Parameter(torch.randn(1, len(nodes), width))
        self.register_buffer("edges", torch.randn(1, len(on_grid), 4))
        self.encoder = _Interaction(on_grid, on_mesh, width)
        self.processor = _Interaction(nodes.repeat(2), torch.cat([nodes.roll(1), nodes.roll(mesh[1])]), width)
        self.of_mesh_edges = nn.Parameter(torch.randn(1, 2 * len(nodes), width))
        self.decoder = _Interaction(on_mesh, on_grid, width)
        self.head = _mlp(width, width, variables)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the fields (N, variables, H, W) of the next time."""
        n, variables, height, width = x.shape
        grid = self.embed_grid(x.flatten(2).transpose(1, 2))
        edges = self.embed_edges(self.edges).expand(n, -1, -1)
        mesh = self.encoder(grid, self.of_mesh.expand(n, -1, -1), edges)
        mesh = self.processor(mesh, mesh, self.of_mesh_edges.expand(n, -1, -1))
        change = self.head(self.decoder(mesh, grid, edges))
        return x + cast(torch.Tensor, change).transpose(1, 2).reshape(n, variables, height, width)
