"""Pictures that a device decodes are cut and flipped as on the host, and refused in its words."""

import io
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image as Pillow

from dataio import (
    CenterCrop,
    FieldError,
    Image,
    Int,
    Mask,
    Pad,
    RandomCrop,
    Resize,
    ResizeLong,
    ResizeShort,
    Workers,
)
from dataio.base.seeding import key, uniform
from dataio.rows import on_device
from dataio.rows.fields import declarations
from dataio.rows.on_device import find_decoder
from dataio.rows.views import NUM_DRAWS
from dataio.world import single_world
from tests.dataio.test_pictures import CROP, NUM_SAMPLES, Pictures, compressed, open_loader, picture

VIEWS: dict[str, Any] = {
    "a box": {"crop": CROP},
    "over the edge": {"crop": RandomCrop(40, padding=12), "fill": 7},
    "the middle": {"resize": ResizeShort(28), "crop": CenterCrop((20, 24))},
    "with a border": {"resize": ResizeLong(32), "crop": Pad(36)},
    "squeezed": {"resize": Resize((25, 40))},
    "gray": {"resize": Resize((25, 40)), "crop": RandomCrop(24), "channels": 1},
}


class Decoder:
    """Stands in for a device: decodes boxes on the host, and keeps what it was given."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.given: list[on_device.JpegPart] = []
        self.refuses: set[bytes] = set()

    def at_work(self):
        return nullcontext()

    def decode(self, parts, channels):
        self.given += parts
        return [self._decoded(part, channels) for part in parts]

    def _decoded(self, part, channels):
        if bytes(part.data) in self.refuses:
            return None
        top, left, height, width = part.box
        try:
            pixels = simplejpeg.decode_jpeg(part.data, "GRAY" if channels == 1 else "RGB")
        except ValueError:
            return None
        return torch.from_numpy(pixels[top : top + height, left : left + width].copy())


@pytest.fixture
def decoder(monkeypatch) -> Decoder:
    made = Decoder()
    monkeypatch.setattr(on_device, "find_decoder", lambda _: lambda: made)
    return made


def batches(directory, decode, *, epochs=1, others=(), options=None, **how):
    fields = {"image": Image("jpg", decode=decode, **how), "label": Int("cls"), **dict(others)}
    with open_loader(single_world(), directory, fields=fields, **(options or {})) as loader:
        return [batch for _ in loader.epochs(epochs) for batch in loader]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and bool((ours.int() - theirs.int()).abs().max() <= 1)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("threads", [0, 2])
def test_a_device_shows_what_the_host_does_in_the_same_order(tmp_path, decoder, view, threads):
    given = {**VIEWS[view], "flip": 0.5, "options": {"workers": Workers(threads=threads)}}
    mask = {name: value for name, value in VIEWS[view].items() if name != "channels"}
    others = {"mask": Mask("png", flip=0.5, **mask)}
    ours = batches(tmp_path / "device", "device", others=others, epochs=2, **given)
    theirs = batches(tmp_path / "host", "host", others=others, epochs=2, **given)
    assert len(ours) == len(theirs) == 2 * -(-NUM_SAMPLES // 4)
    for one, other in zip(ours, theirs, strict=True):
        assert close(one["image"], other["image"])
        assert one["image"].stride() == other["image"].stride()
        for name in ("mask", "label", "sample_id", "weight"):
            assert torch.equal(one[name], other[name])
    assert len(decoder.given) >= 2 * NUM_SAMPLES


def test_a_device_is_given_the_boxes_that_were_drawn_and_no_more(tmp_path, decoder):
    found = batches(tmp_path, "device", crop=CROP, flip=0.5)
    ids = [i for batch in found for i in batch["sample_id"].tolist() if i >= 0]
    draws = uniform(key(5, "pictures", epoch=0), np.array(ids), NUM_DRAWS).tolist()
    boxes = [CROP.box(picture(i).shape[:2], drawn) for i, drawn in zip(ids, draws, strict=True)]
    given = {bytes(part.data): part.box for part in decoder.given}
    assert [given[compressed(i, "jpg")] for i in ids] == boxes
    assert len(set(boxes)) > NUM_SAMPLES // 2


def test_what_a_device_does_not_take_is_decoded_on_the_host(tmp_path, decoder):
    turned, whole = io.BytesIO(), Pillow.fromarray(picture(3))
    exif = Pillow.Exif()
    exif[274] = 6
    whole.save(turned, "JPEG", exif=exif)
    inks = io.BytesIO()
    whole.convert("CMYK").save(inks, "JPEG")
    forms = {1: compressed(1, "png"), 2: turned.getvalue(), 3: inks.getvalue()}
    source = Pictures(8)
    source.instead = forms
    decoder.refuses = {compressed(4, "jpg")}
    given = {"resize": Resize(24), "options": {"source": source}}
    ours = batches(tmp_path / "device", "device", **given)
    theirs = batches(tmp_path / "host", "host", **given)
    taken = {bytes(part.data) for part in decoder.given}
    assert taken == {compressed(i, "jpg") for i in (0, 4, 5, 6, 7)}
    for one, other in zip(ours, theirs, strict=True):
        for row, sample_id in enumerate(one["sample_id"].tolist()):
            assert close(one["image"][row], other["image"][row])
            if sample_id in (1, 2, 3, 4):
                assert torch.equal(one["image"][row], other["image"][row])


def test_a_broken_sample_is_named_or_skipped_as_on_the_host(tmp_path, decoder):
    source, said, shown = Pictures(8), {}, {}
    # Whole by its marks, and its header asks for a table that it has not
    data = bytearray(compressed(5, "jpg"))
    data[data.index(b"\xff\xc0") + 12] = 3
    source.instead = {5: bytes(data)}
    for decode in ("device", "host"):
        with pytest.raises(FieldError) as caught:
            batches(tmp_path / f"{decode} raises", decode, crop=CROP, options={"source": source})
        said[decode] = str(caught.value)
        options = {"source": source, "on_error": "skip"}
        found = batches(tmp_path / decode, decode, crop=CROP, options=options)
        shown[decode] = [
            (i, weight) for batch in found
            for i, weight in zip(batch["sample_id"].tolist(), batch["weight"].tolist(), strict=True)
        ]  # fmt: skip
        assert all(batch["image"].any(dim=(1, 2, 3)).all() for batch in found)
    assert source.instead[5] in {bytes(part.data) for part in decoder.given}
    assert said["device"] == said["host"]
    assert "sample 5, field 'image'" in said["device"]
    assert shown["device"] == shown["host"]
    assert sum(weight == 0 for _, weight in shown["device"]) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "delivers to device=None, expected a GPU; give Loader"),
        ({"device": "cpu"}, "delivers to device=cpu, expected a GPU; give Loader"),
        ({"transform": lambda sample, rng: sample}, "device\" and transform exclude one another"),
        ({"collate": list}, "device\" and collate exclude one another"),
        ({"batch_transform": lambda batch, rng: batch}, "and batch_transform exclude one another"),
        ({"workers": Workers(processes=1)}, r"and Workers\(processes=...\) exclude one another"),
    ],
)  # fmt: skip
def test_a_loader_that_cannot_is_refused_before_anything_is_staged(tmp_path, options, words):
    fields = {"image": Image("jpg", crop=CROP, decode="device")}
    with pytest.raises(ValueError, match=words) as caught:
        open_loader(single_world(), tmp_path, fields=fields, **options)
    assert "field 'image': decode=\"device\"" in str(caught.value)
    assert 'decode="host"' in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_an_evaluation_that_cannot_is_refused_too(tmp_path):
    fields = {"image": Image("jpg", crop=CenterCrop(20), decode="device")}
    with open_loader(single_world(), tmp_path) as loader:
        with pytest.raises(ValueError, match="expected a GPU; give Loader"):
            loader.evaluation(Pictures(8), fields=fields)


def test_a_package_that_is_missing_is_named_with_the_cure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(on_device, "PACKAGE", "nvidia_is_absent.nvimgcodec")
    with pytest.raises(ValueError, match=r"`pip install 'nvidia-nvimgcodec-cu13\[nvjpeg\]'`, or"):
        find_decoder(torch.device("cuda"))


def test_a_cache_does_not_know_where_pictures_are_decoded():
    host, device = Image("jpg", crop=CROP), Image("jpg", crop=CROP, decode="device")
    assert declarations({"image": host}) == declarations({"image": device})
    for options in ({"decoded": True}, {"channels": 4}):
        with pytest.raises(ValueError, match="exclude one another: a GPU decodes gray and colours"):
            Image("jpg", resize=Resize(8), decode="device", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("view", VIEWS)
def test_a_gpu_shows_what_the_host_does(tmp_path, view):
    pytest.importorskip("nvidia.nvimgcodec")
    fields = {
        decode: Image("jpg", flip=0.5, decode=decode, **VIEWS[view])
        for decode in ("device", "host")
    }
    with open_loader(
        single_world(), tmp_path, fields=fields, device="cuda", workers=Workers(threads=2)
    ) as loader:
        for batch in loader:
            ours, theirs = (batch[decode].float() for decode in ("device", "host"))
            assert ours.is_cuda
            errors = (ours - theirs).square().mean(dim=(1, 2, 3))
            flipped = (ours.flip(3) - theirs).square().mean(dim=(1, 2, 3))
            # 30 dB
            assert (errors <= 255**2 / 1000).all()
            assert (errors < flipped).all()
