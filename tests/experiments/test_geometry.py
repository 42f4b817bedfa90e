"""Figure 1 and what it speaks of: the numbers behind the pictures."""

import ast
import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from adpo.cli import app
from adpo.core import presets
from adpo.experiments.geometry import comparison, shapes

ROOT = Path(__file__).parent.parent.parent


def test_sft_goes_to_a_corner_and_adpo_to_the_closed_form():
    found = shapes.paths(tau=0.7)
    sft, ours = found["paths"]["SFT"], found["paths"]["ADPO"]
    assert sft[0] == ours[0] == pytest.approx(shapes.REFERENCE)
    assert sft[-1][0] > 0.95
    q = torch.tensor(shapes.ADVANTAGES).softmax(0)
    right = torch.tensor(shapes.REFERENCE) * q**0.7
    assert ours[-1] == pytest.approx((right / right.sum()).tolist(), abs=1e-3)
    assert found["optimum"] == pytest.approx((right / right.sum()).tolist(), abs=1e-5)
    assert max(sum(point) for point in sft + ours) == pytest.approx(1, abs=1e-5)


def test_the_landscape_of_sft_falls_to_the_first_corner_and_ends_at_the_simplex():
    found = shapes.sft_landscape(points=21)
    for first, row in zip(found["axis"], found["loss"], strict=True):
        for second, value in zip(found["axis"], row, strict=True):
            outside = 1 - first - second <= 0.005
            assert (value is None) == outside
            if not outside:
                assert value == pytest.approx(-math.log(first), abs=1e-4)


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_the_bowl_has_its_bottom_where_tau_log_q_is_and_not_at_the_anchor(tau):
    found = shapes.bowl(tau, points=41)
    table = torch.tensor(found["loss"])
    row, column = divmod(int(table.argmin()), 41)
    spacing = found["axis"][1] - found["axis"][0]
    bottom = [found["axis"][row], found["axis"][column]]
    assert bottom == pytest.approx(found["minimum"], abs=spacing)
    assert found["minimum"] == pytest.approx([2 * tau, tau])  # differences of the advantages
    assert table.min() >= -1e-6
    assert table[20, 20] > 0.05  # the anchor


def test_the_curvature_is_that_of_the_formula():
    for row in shapes.curvature():
        assert row["measured"] == pytest.approx(row["expected"], rel=1e-4)
    first, second = shapes.curvature()[:2]
    assert first["measured"][0] / second["measured"][0] == pytest.approx(
        (second["tau"] / first["tau"]) ** 2, rel=1e-4
    )


def test_small_tau_is_near_at_the_end_and_hard_at_the_start():
    found = shapes.trust_region()
    assert found["kl"] == sorted(found["kl"])
    assert found["force"] == sorted(found["force"], reverse=True)


def test_forces():
    """The clip lets go above its bound; forward ADPO turns round at its optimum and stays bounded."""
    found = shapes.forces()
    moved, forces = found["moved"], found["forces"]
    for at, force in zip(moved, forces["PPO, clipped"], strict=True):
        assert force == pytest.approx(math.exp(at) if at < math.log(1 + shapes.CLIP) else 0, abs=1e-5)
    turned = next(at for at, force in zip(moved, forces["forward ADPO"], strict=True) if force < 0)
    assert turned == pytest.approx(1 / found["beta"], abs=0.1)
    assert max(map(abs, forces["forward ADPO"])) < 1
    far = forces["reverse ADPO"][0]
    assert 0 < far < forces["forward ADPO"][0]  # where the policy has no mass, reverse KL hardly pulls


def test_forward_kl_covers_and_reverse_kl_seeks():
    found = shapes.two_ways()
    places, target = torch.tensor(found["places"]), torch.tensor(found["target"])
    forward, reverse = (torch.tensor(found["fitted"][name]) for name in ("forward KL", "reverse KL"))
    mean = float((places * target).sum())
    assert float((places * forward).sum()) == pytest.approx(mean, abs=0.05)  # moments are matched
    assert float((places * reverse).sum()) == pytest.approx(-1.5, abs=0.1)  # the larger of the two
    assert reverse[places > 0.5].sum() < 0.01 < 0.2 < forward[places > 0.5].sum()


def names_in(file):
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_cell_names_a_test_that_exists():
    cells = [cell for row in comparison.taxonomy() + comparison.GEOMETRY for cell in row]
    assert len(cells) == 5 * (len(presets.TAXONOMY) + 3)
    for cell in cells:
        file, name = cell.test.split("::")
        assert name in names_in(file), cell


def test_the_command(tmp_path):
    done = CliRunner().invoke(app, ["reproduce", "geometry", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.exception
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["experiment"] == "geometry"
    for name in ("figure1", "curvature", "trust_region", "forces", "two_ways"):
        assert (tmp_path / "out" / f"{name}.svg").stat().st_size > 5000
        assert (tmp_path / "out" / f"{name}.png").exists()
    assert "(tests/test_presets.py 'test_dpo')" in (tmp_path / "out" / "tables.md").read_text()
    assert "a bound on the KL" in done.output
    (tmp_path / "file").write_text("")
    again = CliRunner().invoke(app, ["reproduce", "geometry", "--out", str(tmp_path / "file")])
    assert "is a file" in str(again.exception)
