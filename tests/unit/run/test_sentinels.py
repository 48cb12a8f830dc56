"""What sentinels compare and how: digests that differ, sums that tell, settings as text."""

from __future__ import annotations

import functools
import itertools
import random
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.mesh import MeshSpec
from meshwright.run.sentinels import digest, settings
from meshwright.run.sentinels.circles import Circle
from meshwright.run.sentinels.settings import DEFAULT_EVERY, check_sentinels
from meshwright.train.config.load import load_config
from meshwright.train.config.types import TrainSection

# -- digests ---------------------------------------------------------------------------------------------------------

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)


def _tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50
    return (values > 0) if dtype == torch.bool else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (70_001,)], ids=str)
def test_one_bit_anywhere_changes_the_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = _tensor(dtype, *shape)
    digests = {digest.digest_tensor(tensor)}
    num_bytes = tensor.nbytes
    places = sorted({0, 1, num_bytes // 2, num_bytes - 2, num_bytes - 1} & set(range(num_bytes)))
    for place in places:
        other = tensor.clone()
        other.view(-1).view(torch.uint8)[place] ^= 1
        digests.add(digest.digest_tensor(other))
    assert len(digests) == 1 + len(places)


def test_signs_and_order_change_the_digest() -> None:
    tensor = _tensor(torch.float64, 64, 3)
    turned = tensor.clone()
    turned[3, 1] *= -1
    turned[9, 2] *= -1
    others = [-tensor, tensor.flip(0), tensor.roll(1, 0), turned, tensor[:-1], tensor.new_zeros(64, 3)]
    assert len({digest.digest_tensor(t) for t in (tensor, *others)}) == 1 + len(others)


def test_values_alone_decide() -> None:
    tensor = _tensor(torch.float32, 6, 5)
    same = [tensor.clone(), tensor.t().contiguous().t(), torch.cat([tensor, tensor])[:6], nn.Parameter(tensor.clone())]
    assert {digest.digest_tensor(t) for t in same} == {digest.digest_tensor(tensor)}
    assert digest.digest_tensor(tensor.to_sparse()) != digest.digest_tensor(tensor.relu().to_sparse())


def test_empty_and_expanded_tensors_have_digests() -> None:
    tensors = [torch.empty(0), torch.empty(0, 4), torch.zeros(()), torch.zeros(()).expand(1), torch.zeros(()).expand(3)]
    assert all(isinstance(digest.digest_tensor(tensor), int) for tensor in tensors)
    assert isinstance(digest.digest_of(tensors), int)
    assert isinstance(digest.digest_batch(tensors, whole=False), int)


class _Tagged(torch.Tensor):
    """A tensor with a name, as libraries of images have it."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_and_subclasses_are_read(layout: torch.layout) -> None:
    rows = [torch.arange(3.0), torch.arange(5.0)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    other = torch.nested.nested_tensor([rows[0], rows[1] + 1], layout=layout)
    assert digest.digest_batch([nested], whole=False) != digest.digest_batch([other], whole=False)
    tagged = rows[1].as_subclass(_Tagged)
    assert digest.digest_tensor(tagged) == digest.digest_tensor(rows[1])
    assert digest.digest_batch([tagged], whole=False) != digest.digest_batch([tagged + 1], whole=False)


def test_other_devices_compute_the_same_number() -> None:
    row = _tensor(torch.float32, 100_001).view(torch.uint8)
    row = row[: row.numel() // 8 * 8]
    assert digest._device_words(row) == digest._host_words(row)


def test_several_tensors_are_digested_in_their_order() -> None:
    small, large = [_tensor(torch.float32, 3), _tensor(torch.float32, 4)], _tensor(torch.float32, 40_000)
    orders = [[*small, large], [*reversed(small), large], [*small], [large], [*small, -large]]
    assert len({digest.digest_of(tensors) for tensors in orders}) == len(orders)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("shape", [(8, 64), (32, 3, 100, 100)], ids=str)
def test_a_row_of_a_batch_changes_its_digest(shape: tuple[int, ...], whole: bool) -> None:
    batch = {"x": _tensor(torch.float32, *shape), "y": torch.arange(shape[0])}
    seen = {digest.digest_batch(batch, whole=whole)}
    for row in range(shape[0]):
        x = batch["x"].clone()
        x[row] = x[row] * 1.0001 + 0.5
        seen.add(digest.digest_batch({**batch, "x": x}, whole=whole))
    seen.add(digest.digest_batch({**batch, "y": batch["y"].flip(0)}, whole=whole))
    seen.add(digest.digest_batch({**batch, "x": batch["x"].view(shape[0], -1, 2)}, whole=whole))
    seen.add(digest.digest_batch({**batch, "y": batch["y"].int()}, whole=whole))
    seen.add(digest.digest_batch({**batch, "x": batch["x"].clone().requires_grad_()}, whole=whole))
    assert len(seen) == 1 + shape[0] + 4
    assert digest.digest_batch(None, whole=whole) not in seen


def test_tensors_of_a_batch_have_paths() -> None:
    batch = ({"ids": torch.ones(2), "mask": [torch.ones(2)]}, torch.ones(2))
    assert [name for name, _ in digest.named_tensors(batch)] == ["[0]['ids']", "[0]['mask'][0]", "[1]"]


# -- circles ---------------------------------------------------------------------------------------------------------

MESHES = [MeshSpec(tp=2), MeshSpec(dp=2, tp=2), MeshSpec(pp=2, dp=2, tp=2), MeshSpec(pp=3, dp=4), MeshSpec(dp=3, tp=5)]
AXES = (("pp", "cp", "tp"), ("tp",), ("dp", "cp", "tp"), ("pp", "dp", "cp", "tp"))


def _sums(mesh: MeshSpec, axes: tuple[str, ...], said: list[int]) -> list[float]:
    terms = [Circle.over(mesh, rank, *axes).terms(value) for rank, value in enumerate(said)]
    return [sum(column) for column in zip(*terms, strict=True)]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_sum_tells_whether_circles_agree(mesh: MeshSpec, axes: tuple[str, ...]) -> None:
    numbers = random.Random(0)
    circles = mesh.groups(*axes)
    for _ in range(20):
        value_of = {rank: value for ranks in circles for value in [numbers.getrandbits(63)] for rank in ranks}
        said = [value_of[rank] for rank in range(mesh.world_size)]
        assert not any(_sums(mesh, axes, said))
        for ranks in (ranks for ranks in circles if len(ranks) > 1):
            wrong = [
                said[rank] ^ 1 << numbers.randrange(63) if rank == ranks[0] else said[rank] for rank in range(len(said))
            ]
            assert any(_sums(mesh, axes, wrong))
            other, some = numbers.getrandbits(63), ranks[: len(ranks) // 2]
            assert any(_sums(mesh, axes, [other if rank in some else said[rank] for rank in range(len(said))]))
        for one, two in itertools.combinations([ranks for ranks in circles if len(ranks) > 1], 2):
            swapped = list(said)
            swapped[one[-1]], swapped[two[-1]] = said[two[-1]], said[one[-1]]
            assert any(_sums(mesh, axes, swapped))


def test_sums_are_exact_over_the_largest_world() -> None:
    mesh = MeshSpec(dp=2048, tp=8)
    terms = [Circle.over(mesh, rank, "tp").terms(2**63 - 1) for rank in range(mesh.world_size)]
    assert sum(abs(term) for row in terms for term in row) < 2**53


# -- settings --------------------------------------------------------------------------------------------------------


def _scaled(factor: float) -> Any:
    return lambda outputs, batch: outputs * factor


class _Loss:
    def __init__(self, weight: float, path: str) -> None:
        self.weight, self.path = weight, path

    def __call__(self, outputs: Any, batch: Any) -> Any:
        return outputs


def test_what_decides_numbers_is_told_apart_and_what_does_not_is_not() -> None:
    def first(x: Any) -> Any:
        return x + 1

    def second(x: Any) -> Any:
        return x + 2

    texts = [settings.text_of(value) for value in (_scaled(1.0), _scaled(2.0), first, second, nn.functional.gelu)]
    texts += [settings.text_of(functools.partial(first, x=n)) for n in range(2)]
    texts += [settings.text_of(_Loss(weight, "/a")) for weight in (1.0, 2.0)]
    assert len(set(texts)) == len(texts)
    assert None not in texts
    assert settings.text_of(_scaled(1.0)) == settings.text_of(_scaled(1.0))
    assert settings.text_of(_Loss(1.0, "/a/b")) == settings.text_of(_Loss(1.0, "/c"))
    assert settings.text_of("cuda:1") is settings.text_of(object()) is None
    assert settings.text_of({"b", "a"}) == settings.text_of({"a", "b"}) == "{'a', 'b'}"


def test_a_uuid_within_a_text_is_the_same_on_each_rank_and_the_rest_of_the_text_is_not() -> None:
    for make in (lambda: str(uuid.uuid4()), lambda: uuid.uuid4().hex, lambda: str(uuid.uuid1())):
        assert settings.text_of(f"{make()}.state") == settings.text_of(f"{make()}.state") == "'(uuid).state'"
        assert settings.text_of(f"{make()}.a") != settings.text_of(f"{make()}.b")
    assert settings.text_of("f" * 32) == repr("f" * 32)


def test_rows_of_modules_name_classes_and_attributes() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    rows = dict(settings.of_modules(model))
    assert rows["the class of module '1'"] == "torch.nn.modules.activation.ReLU"
    assert rows["attribute 'out_features' of module '0'"] == "3"
    assert rows["attribute 'training' of the model itself"] == "True"
    assert not any("_parameters" in name for name in rows)


def test_options_of_optimizers_are_rows_and_rates_lie_on_the_host() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [weight], "lr": torch.tensor(0.5)}], weight_decay=0.1)
    rows = dict(settings.of_optimizer(optimizer, {id(weight): "weight"}))
    assert rows["the parameters of group 0"] == "weight"
    assert rows["the learning rate of group 0"] == "0.5"
    assert rows["the optimizer's 'weight_decay' of group 0"] == "0.1"
    assert settings.learning_rates(optimizer) == "[0.5]"
    assert settings.learning_rates(None) == "[]"


@pytest.mark.parametrize(("every", "on_finding"), [(-1, "stop"), (1.5, "stop"), (True, "stop"), (5, "skip")])
def test_options_that_make_no_sense_are_refused(every: Any, on_finding: Any) -> None:
    with pytest.raises(ConfigError, match=r"sentinel_every|on_finding") as caught:
        check_sentinels(every, on_finding)
    assert caught.value.fix is not None
    check_sentinels(0, "warn")
    with pytest.raises(ConfigError):
        mw.apply_plan(nn.Linear(2, 2), "single", sentinel_every=every, on_finding=on_finding)


def test_the_configuration_has_the_same_defaults_and_refuses_the_same(tmp_path: Path) -> None:
    fields = TrainSection.model_fields
    assert (fields["sentinel_every"].default, fields["on_finding"].default) == (DEFAULT_EVERY, "stop")
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\ntarget = "torch.nn:Identity"\n[data]\nsource = "python-stdlib"\n[optimizer]\nlr = 0.1\n'
        "[train]\nsteps = 2\nglobal_batch_size = 8\nsentinel_every = -1\n"
    )
    with pytest.raises(ConfigError, match=r"train\.sentinel_every"):
        load_config(path)
