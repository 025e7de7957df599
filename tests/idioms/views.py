"""Views, slices and changes in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def through(b: Bench, change: object) -> Found:
    """``change(x)`` of features that gradients flow through; its result, and the gradients of all weights."""
    x = b.model.begin(b.images())
    y = change(x)  # type: ignore[operator]
    (y * y).sum().backward()
    return b.gradients() | {"y": y}


@idiom(quick=True)
def a_view_is_read_after_its_source_was_changed(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        v = x.view(x.size(0), x.size(1), -1)
        F.relu(x.sub_(1), inplace=True)
        return v.mean(2)

    return through(b, change)


@idiom()
def a_flat_view_is_written(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5
        x.flatten(2).mul_(0.5)
        x.view(-1)[3:40] = 0.25
        return x

    return through(b, change)


@idiom(quick=True)
def channels_are_written_by_slices(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, :3] = x[:, 2:5]
        y[:, 3:, 1:-1] += x[:, 3:, 1:-1] * 2
        y[..., ::2] *= 0.5
        return y

    return through(b, change)


@idiom()
def features_shift_in_time_by_slices(b: Bench) -> Found:
    """A temporal shift module, over the rows."""

    def change(x: torch.Tensor) -> torch.Tensor:
        fold = x.size(1) // 3
        out = torch.zeros_like(x)
        out[:, :fold, :-1] = x[:, :fold, 1:]
        out[:, fold : 2 * fold, 1:] = x[:, fold : 2 * fold, :-1]
        out[:, 2 * fold :] = x[:, 2 * fold :]
        return out

    return through(b, change)


@idiom()
def space_becomes_channels_by_slices(b: Bench) -> Found:
    """The focus layer of YOLOv5."""

    def change(x: torch.Tensor) -> torch.Tensor:
        x = x[..., :6, :8]
        return torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1)

    return through(b, change)


@idiom()
def space_becomes_channels_by_views(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x[:, :, :6, :8]
        n, c, h, w = x.shape
        x = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).contiguous()
        return x.view(n, c * 4, h // 2, w // 2)

    return through(b, change)


@idiom()
def samples_are_unbound_and_stacked(b: Bench) -> Found:
    return through(b, lambda x: torch.stack([each * (i + 1) for i, each in enumerate(x.unbind(0))], dim=0))


@idiom()
def channels_are_unbound_and_joined(b: Bench) -> Found:
    return through(b, lambda x: torch.stack(torch.unbind(x, 1)[::-1], 1) * 2)


@idiom()
def channels_are_chunked_and_gated(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        first, second = x[:, :6].chunk(2, dim=1)
        return first * torch.sigmoid(second)

    return through(b, change)


@idiom()
def channels_are_split_in_unequal_parts(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        first, second, third = torch.split(x, [1, 2, 4], dim=1)
        return torch.cat([third, first.expand(-1, 2, -1, -1) + second], 1)

    return through(b, change)


@idiom()
def channels_are_shuffled(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        n, _, h, w = x.shape
        return x[:, :6].reshape(n, 2, 3, h, w).transpose(1, 2).reshape(n, 6, h, w)

    return through(b, change)


@idiom()
def images_are_iterated_over(b: Bench) -> Found:
    return through(b, lambda x: sum(each.mean(0) * i for i, each in enumerate(x)))


@idiom()
def a_row_is_selected_and_broadcast(b: Bench) -> Found:
    return through(b, lambda x: x * x.select(2, 3).unsqueeze(2) + x[:, :, -1:, :] - x[:, :, [0, 2, 5]].mean(2, True))


@idiom()
def windows_are_unfolded_from_a_dimension(b: Bench) -> Found:
    return through(b, lambda x: x.unfold(2, 3, 2).unfold(3, 3, 3).amax((-1, -2)))


@idiom()
def patches_are_unfolded_and_folded(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        columns = F.unfold(x, 3, padding=1, stride=2)
        return F.fold(columns * 2, x.shape[2:], 3, padding=1, stride=2)

    return through(b, change)


@idiom()
def dimensions_are_squeezed_and_expanded(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        pooled = F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)
        return x * pooled[:, :, None, None].expand_as(x) + pooled.view(*pooled.shape, 1, 1)

    return through(b, change)


@idiom()
def activations_work_in_place_on_sums(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y += x * 2
        y = F.leaky_relu(y, 0.1, inplace=True) * 1
        y.clamp_(max=3).add_(x.mean()).mul_(x.sigmoid())
        return F.silu(y, inplace=True)

    return through(b, change)


@idiom()
def a_view_is_detached_and_changed(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        x.detach()[:, 0].zero_()
        x.data[:, :, 0] = 1
        return x.mean((0, 2)) * 1

    return through(b, change)


@idiom()
def rows_are_rolled_and_flipped(b: Bench) -> Found:
    return through(b, lambda x: x.roll((1, -2), (2, 3)) + x.flip(3) * torch.fliplr(x).rot90(2, (2, 3)))


@idiom()
def narrow_views_are_filled(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.narrow(2, 2, 3).copy_(x.narrow(2, 0, 3))
        y.select(1, 2).fill_(0.5)
        return y

    return through(b, change)


@idiom()
def a_diagonal_is_changed(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        diagonal = y.diagonal(dim1=2, dim2=3)
        diagonal.mul_(x.mean()).add_(1)
        y *= 2
        return y * diagonal.sum()

    return through(b, change)


@idiom()
def a_buffer_is_filled_image_by_image(b: Bench) -> Found:
    x = b.images()
    out = x.new_zeros(len(x), 5)
    for i in range(len(x)):
        out[i] = b.model.eval()(x[i : i + 1])[0]
    (out**2).sum().backward()
    return b.gradients() | {"out": out}


@idiom()
def one_image_is_given_a_dimension_and_back(b: Bench) -> Found:
    image = b.images()[2]
    return {"y": b.model.eval()(image[None]).squeeze(0), "same": image.unsqueeze(0).expand(4, -1, -1, -1).sum(0)}


@idiom()
def channels_come_last_and_back(b: Bench) -> Found:
    norm = b.made(lambda: nn.LayerNorm(7))
    found = through(b, lambda x: norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous())
    return found | {f"norm {n}": g for n, g in b.gradients(norm).items()}


@idiom()
def the_memory_format_is_channels_last(b: Bench) -> Found:
    b.model.to(memory_format=torch.channels_last)
    x = b.images().to(memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last)
    F.cross_entropy(b.model(x), b.labels()).backward()
    return b.gradients()


@idiom()
def movedim_and_swapaxes_turn_a_volume(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        volume = x.unsqueeze(2).movedim(2, -1).swapaxes(1, 4).squeeze(1)
        return volume.transpose(1, -1).flatten(1, 2).unflatten(1, (7, 9))

    return through(b, change)


@idiom()
def tensors_are_viewed_as_complex(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(torch.stack([x, x.flip(2)], -1))
        return torch.view_as_real(z * torch.polar(torch.ones_like(x), x.detach())).flatten(3).abs()

    return through(b, change)


@idiom()
def an_image_is_cut_into_tiles_and_joined(b: Bench) -> Found:
    """Sliding windows with overlap, weighed, as in MONAI's inference."""
    x, b.model = b.images(), b.model.eval()
    total, weight = torch.zeros_like(x[:, :1]), torch.zeros_like(x[:, :1])
    for top in (0, 3):
        for left in (0, 2, 5):
            tile = x[:, :, top : top + 4, left : left + 4]
            total[:, :, top : top + 4, left : left + 4] += b.model.begin(tile).mean(1, keepdim=True)
            weight[:, :, top : top + 4, left : left + 4] += 1
    return {"joined": total / weight}


@idiom()
def a_loss_map_gets_a_border_of_zeros(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        m = (x - 0.5) ** 2
        m[..., 0] = m[..., -1] = 0
        m[:, :, 0, :] = 0
        return m

    return through(b, change)


@idiom()
def an_index_tensor_picks_channels(b: Bench) -> Found:
    order = torch.tensor([6, 0, 0, 3])
    return through(
        b, lambda x: x[:, order] + x.index_select(1, order) * torch.take_along_dim(x, order.view(1, 4, 1, 1), 1)
    )


@idiom()
def two_views_of_one_tensor_are_added(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        left, right = y[..., :5], y[..., 4:]
        left += 1
        right *= 2
        return left + right

    return through(b, change)


@idiom()
def a_column_is_swapped_with_another(b: Bench) -> Found:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, [0, 1]] = y[:, [1, 0]]
        y[:, :, :, [2, 6]] = x[:, :, :, [6, 2]]
        return y * x

    return through(b, change)


@idiom()
def out_arguments_receive_results(b: Bench) -> Found:
    with torch.no_grad():
        x = b.images()
        y, z = torch.empty_like(x), torch.empty(0, dtype=torch.float64)
        torch.mul(x, 2, out=y)
        torch.exp(y.clamp(max=1), out=y)
        plain = torch.zeros(5, 3, 7, 9, dtype=torch.float64)
        plain.copy_(y)
        plain += x
        return {"y": y, "plain": plain, "z": z}


@idiom()
def plain_constants_meet_distributed_features(b: Bench) -> Found:
    rows = torch.linspace(-1, 1, 7, dtype=torch.float64).view(1, 1, 7, 1)
    return through(b, lambda x: x * rows + torch.arange(9).double() + normal(7, 1, 1, seed=3) - normal(5, 1, 1, 1))


@idiom()
def coordinates_become_channels(b: Bench) -> Found:
    """CoordConv."""

    def change(x: torch.Tensor) -> torch.Tensor:
        n, _, h, w = x.size()
        rows = torch.arange(h, dtype=x.dtype, device=x.device).view(1, 1, h, 1).expand(n, 1, h, w)
        columns = torch.linspace(-1, 1, w).type_as(x).repeat(n, 1, h, 1)
        return torch.cat([x, rows.to(x), columns, (rows**2 + columns**2).sqrt()], dim=1)

    return through(b, change)
