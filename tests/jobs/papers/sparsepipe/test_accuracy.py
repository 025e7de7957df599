"""``distconv reproduce sparsepipe-accuracy``: both networks see the same voxels; its tables as approved."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from mpi4py import MPI

from distconv import cli
from distconv.jobs.papers.sparsepipe import accuracy
from distconv.jobs.papers.sparsepipe.accuracy import Subset, trained
from distconv.jobs.pointcloud.classification.samples import CloudSamples
from distconv.layers.sparse import SparseTensor
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused
from tests.jobs.pointcloud.cloud_files import write_ours

SMALL = {"train": 4, "test": 2, "epochs": 2, "batch": 2, "points": 20, "width": 1, "lr": 1e-3}


@pytest.mark.long
def test_both_see_the_same_voxels_and_begin_with_the_same_weights(tmp_path, monkeypatch):
    write_ours(tmp_path / "x.h5")
    samples = CloudSamples(tmp_path / "x.h5", MPI.COMM_SELF)
    parts = {group: Subset.of(samples.groups[group], SMALL[group]) for group in ("train", "test")}
    assert len(set(parts["train"].indices)) == 4
    seen = {"sparse": [], "dense": []}

    def noting(kind):
        make = accuracy.NETWORKS[kind]

        def made(*args, **options):
            model = make(*args, **options)
            model.register_forward_pre_hook(
                lambda module, args: seen[kind].append(
                    (args[0], {k: v.clone() for k, v in module.state_dict().items()})
                )
            )
            return model

        return made

    monkeypatch.setattr(accuracy, "NETWORKS", {kind: noting(kind) for kind in seen})
    found = {kind: trained(kind, 3, parts, 3, argparse.Namespace(**SMALL), resolution=32) for kind in seen}
    assert all(share in (0.0, 0.5, 1.0) for share, _ in found.values())
    assert len(seen["sparse"]) == len(seen["dense"]) == 2 * 2 + 1
    for (x, _), (volume, _) in zip(seen["sparse"], seen["dense"], strict=True):
        assert isinstance(x, SparseTensor)
        assert volume.shape == (2, 1, 32, 32, 32)
        assert int(volume.sum()) == len(x.coords)
        assert torch.all(volume[(x.coords[:, 0], 0, *x.coords[:, 1:].unbind(1))] == 1)
    (_, ours), (_, theirs) = seen["sparse"][0], seen["dense"][0]
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    samples.close()


def test_tables_and_rows_are_as_approved(tmp_path, monkeypatch, capsys):
    def made_up(kind, seed, parts, classes, options, *, resolution):
        sizes = [len(part.indices) for part in parts.values()]
        print(f"{kind} {seed} {sizes} {classes} {resolution}; {options.epochs} {options.batch} {options.lr}")
        return (seed + (kind == "dense")) / 16, resolution / 2

    write_ours(tmp_path / "x.h5")
    monkeypatch.setattr(accuracy, "trained", made_up)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    words = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    words += ["--data", str(tmp_path / "x.h5"), "--json", str(tmp_path / "found.json")]
    lines = []
    for more in (["--seeds", "4", "7"], ["--resolution", "32", "40", "--networks", "sparse", "--seeds", "4"]):
        assert cli.main(["reproduce", "sparsepipe-accuracy", *words, *more]) == 0
        lines.append(capsys.readouterr().out.replace(str(tmp_path), "FOLDER"))
        lines += map(str, json.loads((tmp_path / "found.json").read_text())["accuracy"])
    assert_approved("sparsepipe-accuracy", "\n".join(lines))


def test_too_few_voxels_for_the_dense_network_are_refused_in_a_line(capsys):
    text = "--resolution 16: too small for the dense network"
    assert_refused(capsys, ["reproduce", "sparsepipe-accuracy", "--resolution", "32", "16"], text)
