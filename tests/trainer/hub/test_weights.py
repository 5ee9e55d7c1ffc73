"""Weights in Hugging Face's layout: found by name, checked, and laid out as the model has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tonari.trainer.checkpoint.weights import WeightFiles
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import GPT, HubFormat, Llama, StagedModel, Stored
from tonari.trainer.run.dry_run import dry_run
from tonari.trainer.run.loop import train

save_file = pytest.importorskip("safetensors.torch", reason="tonari[export]").save_file

HEADS, HEAD_WIDTH = 2, 4
WIDTH = HEADS * HEAD_WIDTH
RUN = """
[data]
kind = "text"
train = "no such text"
[shuffle]
exchange = 0.1
[model]
kind = "llama"
depth = 1
heads = 2
weights = "{weights}"
[run]
directory = "{directory}"
device = "cpu"
"""


class Gpt2(GPT):
    """Our GPT in files laid out as GPT-2's: q, k and v of all heads apart, and transposed."""

    def hub_format(self) -> HubFormat:
        # int64[3, heads, head_width] there -> [heads, 3, head_width] here
        order = torch.arange(3 * WIDTH).view(3, HEADS, HEAD_WIDTH).transpose(0, 1).flatten()
        tensors = {"stem.tokens.weight": Stored(name="wte", leading=1)}
        for number in range(self.num_blocks):
            ours, theirs = f"blocks.{number}.attention", f"h.{number}.attn"
            tensors[f"{ours}.qkv.weight"] = Stored(
                name=f"{theirs}.c_attn.weight", transposed=True, order=order
            )
            tensors[f"{ours}.qkv.bias"] = Stored(name=f"{theirs}.c_attn.bias", order=order)
        return HubFormat(tensors=tensors, ignored=(r"h\.\d+\.attn\.mask",))


def gpt2() -> Gpt2:
    return Gpt2(12, 8, width=WIDTH, depth=2, heads=HEADS)


def as_gpt2(model: GPT) -> dict[str, Tensor]:
    """Lay out our weights as GPT-2's files have them."""
    found = {"h.0.attn.mask": torch.zeros(3)}
    for name, value in model.state_dict().items():
        if name == "stem.tokens.weight":
            found["wte"] = value[None]
        elif "qkv" in name:
            rows = value.unflatten(0, (HEADS, 3, HEAD_WIDTH)).transpose(0, 1).flatten(0, 2)
            theirs = name.replace("blocks", "h").replace("attention.qkv", "attn.c_attn")
            found[theirs] = rows.T.contiguous() if name.endswith("weight") else rows.contiguous()
        else:
            found[name] = value
    return found


def test_tensors_may_be_transposed_and_have_their_rows_in_another_order(tmp_path: Path) -> None:
    given, taken = gpt2(), gpt2()
    save_file(as_gpt2(given), tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    files.check(taken)
    files.read_into([taken])
    for name, value in given.state_dict().items():
        assert torch.equal(taken.state_dict()[name], value), name


def test_a_file_may_be_of_another_precision(tmp_path: Path) -> None:
    given, taken = gpt2(), gpt2()
    save_file({n: v.bfloat16() for n, v in as_gpt2(given).items()}, tmp_path / "model.safetensors")
    WeightFiles(tmp_path / "model.safetensors").read_into([taken])
    name = "head.linear.weight"
    assert torch.equal(taken.state_dict()[name], given.state_dict()[name].bfloat16().float())


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name) if name in tensors else None


def with_one(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            without("h.1.attn.c_attn.bias"),
            r"hub: h\.1\.attn\.c_attn\.bias is missing, found 28 of the 29 tensors of this Gpt2; "
            r"set \[model\]",
        ),
        (
            with_one("h.2.mlp", 3),
            r"hub: h\.2\.mlp is not expected, found the 29 tensors of .* 1 more; set \[model\]",
        ),
        (
            with_one("h.0.attn.c_attn.weight", 24, 8),
            r"h\.0\.attn\.c_attn\.weight is \[24, 8\], expected \[8, 24\] as .*; set \[model\]",
        ),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_files_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = as_gpt2(gpt2())
    damage(tensors)
    (tmp_path / "hub").mkdir()
    save_file(tensors, tmp_path / "hub/model.safetensors")
    with pytest.raises(ConfigError, match=message):
        WeightFiles(tmp_path / "hub").check(gpt2())


def test_many_names_are_counted(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"wte, .* and 25 more are missing, found 0 .* and others, such as a;"
    ):
        WeightFiles(tmp_path).check(gpt2())


def index(directory: Path, **content: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda d: None, r"model.weights is .*, found nothing, expected a .safetensors file, or"),
        (lambda d: (d / "pytorch_model.bin").touch(), r"found pytorch_model.bin, exp.*; give"),
        (
            lambda d: (d / "model.safetensors").write_bytes(b"damaged"),
            r"model.safetensors: cannot be read as safetensors: .*; bring it back",
        ),
        (lambda d: index(d), r"index.json: found no weight_map of names and files, expected one"),
        (
            lambda d: index(d, weight_map={"a": "model-1.safetensors"}),
            r"model-1.safetensors: cannot be read as safetensors",
        ),
        (
            lambda d: (d / "config.json").write_text("{"),
            r"config.json: cannot be read as JSON: .*; bring it back",
        ),
        (
            lambda d: (d / "config.json").write_text("[]"),
            r"config.json: found a JSON list, expected an object; bring it back",
        ),
    ],
)  # fmt: skip
def test_a_directory_without_readable_files_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None], message: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(ConfigError, match=message):
        WeightFiles(tmp_path)


def llama(directory: Path, **sizes: Any) -> Llama:
    """Write the files of a model."""
    model = Llama(depth=1, heads=2, **sizes)
    directory.mkdir()
    names = model.hub_format()
    save_file(
        {names.stored(name).name: value for name, value in model.state_dict().items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(names.config))
    return model


@pytest.mark.parametrize(
    ("sizes", "overrides", "message"),
    [
        ({"width": 24}, (), r"no such text"),
        (
            {"width": 24},
            ("model.width=32",),
            r"model.width is 32, expected 24 as .*config.json has",
        ),
        ({"width": 24}, ("model.depth=2",), r"model.depth is 2, expected 1 as .*config.json has"),
    ],
)
def test_weights_are_read_before_the_data_and_config_json_gives_the_sizes(
    tmp_path: Path, sizes: dict[str, int], overrides: tuple[str, ...], message: str
) -> None:
    llama(tmp_path / "hub", **sizes)
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "gemma", r"config.json: model_type is 'gemma', expected 'llama', which is"),
        ("attention_bias", True, r"config.json: attention_bias is True, expected False"),
        ("rope_parameters", {"rope_type": "yarn"}, r'rope_type is \'yarn\', expected "default" or'),
        ("intermediate_size", 64, r"hub: model.layers.0.mlp.gate_proj.weight is \[96, 32\], expec"),
    ],
)
def test_a_config_json_of_another_model_is_refused_before_the_data_is_opened(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    llama(tmp_path / "hub", width=32)
    config = tmp_path / "hub/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=message):
        start(tmp_path)


def test_a_dry_run_refuses_them_too(tmp_path: Path) -> None:
    llama(tmp_path / "hub", width=32)
    config = settings(tmp_path)
    assert dry_run(config, world_size=2, num_nodes=1).parameters > 0
    (tmp_path / "hub/model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.weights is .*hub, found config.json, expected"):
        dry_run(config, world_size=2, num_nodes=1)


def start(directory: Path, *overrides: str) -> None:
    train(settings(directory, *overrides))


def settings(directory: Path, *overrides: str) -> Config:
    path = directory / "run.toml"
    path.write_text(RUN.format(weights=directory / "hub", directory=directory / "run"))
    return load_config(path, overrides)


def test_plain_names_are_the_default(tmp_path: Path) -> None:
    given, taken = GPT(12, 8, width=8, heads=2), GPT(12, 8, width=8, heads=2)
    save_file(given.state_dict(), tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    files.check(taken)
    files.read_into([taken])
    assert all(map(torch.equal, given.parameters(), taken.parameters()))
    assert isinstance(taken, StagedModel)
