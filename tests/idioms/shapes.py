"""Masks, sorting, einsum, indexing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def through(b: Bench, change: Any) -> Found:
    """``change(x)`` of features that gradients flow through; its results, and the gradients of all weights."""
    y = change(b.model.begin(b.images()))
    found = y if isinstance(y, dict) else {"y": y}
    sum((v.abs() ** 2).sum() for v in found.values() if v.requires_grad).backward()
    return b.gradients() | found


# -- masks ------------------------------------------------------------------------------------------------------------


@idiom(quick=True)
def a_mask_picks_elements(b: Bench) -> Found:
    return through(b, lambda x: x[x > 0.5])


@idiom()
def a_mask_of_pixels_picks_vectors(b: Bench) -> Found:
    keep = b.masks() > 1
    return through(b, lambda x: x.permute(0, 2, 3, 1)[keep])


@idiom()
def a_mask_is_written(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[y > 1] = 1.0
        y[(y < 0.2) & (y > 0.1)] *= 3
        return y.masked_fill(x == 0, -1.0)

    return through(b, change)


@idiom()
def a_mask_of_samples_picks_images(b: Bench) -> Found:
    return through(b, lambda x: x[b.labels() == 3].mean((2, 3)))


@idiom()
def values_where_one_holds(b: Bench) -> Found:
    return through(b, lambda x: torch.where(x > x.mean(), x, 0.1 * x) + torch.where(x > 0, 1.0, 0.0))


@idiom()
def places_that_are_not_zero(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        rows = torch.nonzero(x > 1.5)
        n, c, h, w = torch.where(x > 1.5)
        return {"rows": rows, "values": x[n, c, h, w], "count": (x > 1.5).sum(), "first": (x > 1.5).nonzero()[:, 0]}

    return through(b, change)


@idiom()
def masked_elements_are_selected_and_scattered(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        mask = x > 0.4
        picked = torch.masked_select(x, mask)
        return {"picked": picked, "back": torch.zeros_like(x).masked_scatter(mask, picked * 2)}

    return through(b, change)


@idiom()
def classes_that_occur_are_unique(b: Bench) -> Found:
    values, counts = torch.unique(b.masks(), return_counts=True)
    return {"values": values, "counts": counts, "bins": torch.bincount(b.masks().flatten(), minlength=6)}


@idiom()
def a_block_of_each_image_is_masked(b: Bench) -> Found:
    """DropBlock."""

    def change(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        seeds = (torch.rand(x.shape[0], *x.shape[2:]) < 0.1).to(x.dtype)
        block = 1 - F.max_pool2d(seeds[:, None], 3, 1, 1).squeeze(1)
        return x * block[:, None] * (block.numel() / block.sum())

    return through(b, change)


@idiom()
def a_causal_mask_hides_later_tokens(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        scores = tokens @ tokens.transpose(1, 2)
        later = torch.triu(torch.ones(63, 63, dtype=torch.bool), 1)
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ tokens

    return through(b, change)


@idiom()
def a_mask_is_padded_batches(b: Bench) -> Found:
    lengths = torch.tensor([3, 7, 1, 5, 2])
    valid = torch.arange(7)[None] < lengths[:, None]

    def change(x: torch.Tensor) -> torch.Tensor:
        rows = x.mean(3).transpose(1, 2)
        return (rows * valid[..., None]).sum(1) / lengths[:, None]

    return through(b, change)


# -- order ------------------------------------------------------------------------------------------------------------


@idiom()
def the_largest_values_of_rows(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        values, places = x.flatten(2).topk(4, dim=-1)
        return {"values": values, "places": places, "again": x.flatten(2).gather(2, places)}

    return through(b, change)


@idiom()
def channels_are_sorted_by_their_means(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        order = x.mean((0, 2, 3)).argsort(descending=True)
        return x[:, order][:, :4]

    return through(b, change)


@idiom()
def values_are_sorted_and_summed(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        values, places = torch.sort(x.flatten(1), dim=1, descending=True, stable=True)
        return {"sums": values.cumsum(1), "places": places, "kth": x.kthvalue(2, dim=2).values}

    return through(b, change)


@idiom()
def medians_and_quantiles(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        y = x + normal(5, 7, 7, 9, seed=8)
        return {
            "median": y.median(), "along": y.median(2).values, "mode": (y * 2).round().mode(1).values,
            "quantile": y.quantile(0.3), "rows": torch.quantile(y, torch.tensor([0.1, 0.9]).double(), dim=3),
        }  # fmt: skip

    return through(b, change)


@idiom()
def values_fall_into_bins(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        edges = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
        return {
            "bins": torch.bucketize(x, edges), "counts": torch.histc(x, 5, 0, 2),
            "searched": torch.searchsorted(edges, x.contiguous()),
        } | {"kept": x}  # fmt: skip

    return through(b, change)


@idiom()
def the_arguments_of_extremes(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        values, places = x.max(dim=1)
        return {"values": values, "places": places, "all": x.argmax(), "rows": x.argmin(-1), "cut": x.aminmax(dim=3)[1]}

    return through(b, change)


@idiom()
def soft_places_of_extremes(b: Bench) -> Found:
    """The soft argmax of heat maps (keypoints)."""

    def change(x: torch.Tensor) -> torch.Tensor:
        heat = x.flatten(2).softmax(-1).view_as(x)
        rows = (heat.sum(3) * torch.arange(7).to(x)).sum(2)
        columns = (heat.sum(2) * torch.arange(9).to(x)).sum(2)
        return torch.stack([columns, rows], -1)

    return through(b, change)


@idiom()
def peaks_survive_their_neighbours(b: Bench) -> Found:
    """CenterNet's decoding."""

    def change(x: torch.Tensor) -> Found:
        heat = x * (F.max_pool2d(x, 3, 1, 1) == x).double()
        scores, where = heat.view(x.size(0), x.size(1), -1).topk(3)
        rows, columns = torch.div(where, 9, rounding_mode="floor"), where % 9
        best, index = scores.view(x.size(0), -1).topk(3)
        return {
            "best": best, "class": (index / 3).int(), "rows": rows.view(x.size(0), -1).gather(1, index),
            "columns": columns.view(x.size(0), -1).gather(1, index),
        }  # fmt: skip

    return through(b, change)


# -- sums of products -------------------------------------------------------------------------------------------------


@idiom(quick=True)
def einsum_mixes_channels(b: Bench) -> Found:
    weight = normal(4, 7, seed=3)
    return through(
        b, lambda x: torch.einsum("nchw,oc->nohw", x, weight) + torch.einsum("nchw,nchw->nh", x, x)[:, None, :, None]
    )


@idiom()
def einsum_compares_places(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bcij,bckl->bijkl", x, x).flatten(3).softmax(-1)
        return torch.einsum("bijp,bcp->bcij", scores, x.flatten(2))

    return through(b, change)


@idiom()
def einsum_along_an_axis(b: Bench) -> Found:
    """Axial attention: rows, then columns."""

    def change(x: torch.Tensor) -> torch.Tensor:
        rows = torch.einsum("bchw,bciw->bwhi", x, x).softmax(-1)
        y = torch.einsum("bwhi,bciw->bchw", rows, x)
        columns = torch.einsum("bchw,bchj->bhwj", y, y).softmax(-1)
        return torch.einsum("bhwj,bchj->bchw", columns, y)

    return through(b, change)


@idiom()
def gram_matrices_of_features(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        flat = x.view(x.size(0), x.size(1), -1)
        return {"gram": torch.bmm(flat, flat.transpose(1, 2)) / flat.size(2), "all": flat[0] @ flat[1].t()}

    return through(b, change)


@idiom()
def distances_between_all_samples(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        flat = x.flatten(1)
        return {
            "cdist": torch.cdist(flat[:2], flat[2:]), "cosine": F.cosine_similarity(flat[:, None], flat[None], dim=-1),
            "pairs": F.pairwise_distance(flat, flat.flip(0) + 1),
        }  # fmt: skip

    return through(b, change)


@idiom()
def tensors_are_contracted_and_multiplied(b: Bench) -> Found:
    w = normal(7, 9, 3, seed=1)

    def change(x: torch.Tensor) -> Found:
        return {
            "dot": torch.tensordot(x, w, dims=([2, 3], [0, 1])), "batch": torch.matmul(x, w[0]),
            "outer": torch.outer(x[0, 0, 0], x[1, 1, 1]), "kron": torch.kron(x[0, 0], torch.eye(2).double()),
            "norms": torch.linalg.vector_norm(x, 3, dim=(2, 3)), "det": torch.linalg.det(x[:, 0, :7, :7]
            + torch.eye(7)),
        }  # fmt: skip

    return through(b, change)


@idiom()
def covariances_are_whitened(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        flat = x.transpose(0, 1).flatten(1)
        flat = flat - flat.mean(1, keepdim=True)
        covariance = flat @ flat.t() / flat.size(1) + 0.1 * torch.eye(7, dtype=x.dtype)
        root = torch.linalg.inv(torch.linalg.cholesky(covariance))
        return (root @ flat).view(7, 5, 7, 9).transpose(0, 1)

    return through(b, change)


@idiom()
def a_linear_system_is_solved(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        a = x[:, :, :, :7].transpose(2, 3) @ x[:, :, :, :7] + torch.eye(7).double()
        return {"x": torch.linalg.solve(a, x[:, :, :, 7:]), "eigen": torch.linalg.eigvalsh(a), "log": a.logdet()}

    return through(b, change)


# -- indexing ---------------------------------------------------------------------------------------------------------


@idiom()
def scores_of_labels_are_gathered(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        logits = x.mean((2, 3))
        labels = b.labels()
        return {"own": logits.gather(1, labels.view(-1, 1)), "indexed": logits[torch.arange(5), labels]}

    return through(b, change)


@idiom()
def points_of_feature_maps_are_picked(b: Bench) -> Found:
    rows, columns = torch.tensor([0, 6, 3]), torch.tensor([8, 0, 4])
    return through(b, lambda x: {"points": x[:, :, rows, columns], "grid": x[:, :, rows[:, None], columns[None]]})


@idiom()
def one_hot_labels_by_scatter(b: Bench) -> Found:
    hot = torch.zeros(5, 5, dtype=torch.float64).scatter_(1, b.labels().unsqueeze(1), 1.0)
    maps = F.one_hot(b.masks(), 5).permute(0, 3, 1, 2).double()
    return through(b, lambda x: {"hot": hot, "maps": maps, "x": x[:, :5] * maps})


@idiom()
def sums_are_scattered_by_class(b: Bench) -> Found:
    """Prototypes: the mean vector of each class."""

    def change(x: torch.Tensor) -> Found:
        vectors, labels = x.permute(0, 2, 3, 1).reshape(-1, 7), b.masks().reshape(-1)
        sums = torch.zeros(5, 7, dtype=x.dtype).index_add(0, labels, vectors)
        counts = torch.zeros(5, dtype=x.dtype).scatter_add(0, labels, torch.ones(labels.shape, dtype=x.dtype))
        largest = torch.zeros(5, 7, dtype=x.dtype).scatter_reduce(
            0, labels[:, None].expand(-1, 7), vectors, reduce="amax"
        )
        return {"prototypes": sums / counts.clamp(min=1)[:, None], "largest": largest}

    return through(b, change)


@idiom()
def sequences_are_padded_and_stacked(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        rows = [x[i, :, : i + 1].flatten(1).t() for i in range(5)]
        return {
            "padded": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "blocks": torch.block_diag(*rows[:2]),
        }

    return through(b, change)


@idiom()
def repeated_interleaved_and_tiled(b: Bench) -> Found:
    return through(
        b,
        lambda x: {
            "interleaved": x.repeat_interleave(2, dim=0), "repeated": x.repeat(1, 2, 1, 1), "tiled": x.tile((1,
                1, 2, 1)),
            "meshed": torch.cat(torch.meshgrid(x[0, 0, 0], x[0, 0, 1], indexing="ij")),
        },
    )  # fmt: skip


@idiom()
def lower_triangles_and_diagonals(b: Bench) -> Found:
    rows, columns = torch.tril_indices(7, 7, -1)

    def change(x: torch.Tensor) -> Found:
        square = x.mean(0) @ x.mean(0).transpose(1, 2)
        return {
            "low": square.tril(-1), "pairs": square[:, rows, columns], "diagonal": square.diagonal(dim1=1, dim2=2),
            "trace": square[0].trace(), "off": square[0].flatten()[:-1].view(6, 8)[:, 1:].flatten(),
        }  # fmt: skip

    return through(b, change)


@idiom()
def shapes_are_asked_and_computed_with(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        assert x.shape == (5, 7, 7, 9) and x.size()[-2:] == (7, 9) and len(x.shape) == x.ndim == 4
        n, c, *space = x.shape
        assert isinstance(x, torch.Tensor) and x.is_contiguous() and x.stride(0) == c * 63 and x.numel() == n * c * 63
        return x.reshape(n, -1) / (x.shape[1] ** 0.5 * torch.tensor(space).prod())

    return through(b, change)


@idiom()
def differences_of_neighbours(b: Bench) -> Found:
    def change(x: torch.Tensor) -> Found:
        return {
            "diff": x.diff(dim=2), "slices": (x[..., 1:] - x[..., :-1]).abs(), "gradient": torch.gradient(x,
                dim=(2, 3))[1],
            "cumulated": x.logcumsumexp(3), "product": (x * 0.1 + 1).cumprod(2), "trapezoid": torch.trapezoid(x, dim=3),
        }  # fmt: skip

    return through(b, change)
