"""Pictures of which a part is missing are found as they are staged; ``on_error="skip"`` holds
wherever a picture is read."""

import io
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image as Pillow

import shuffle
from dataio import (
    CenterCrop,
    FieldError,
    Image,
    ImageSize,
    Loader,
    Mask,
    NodeCache,
    RandomResizedCrop,
    Reports,
    Resize,
    Staging,
    Workers,
)
from dataio.rows.decode import check_decodes
from dataio.rows.refused import WORDS
from dataio.rows.whole import find_suspects, is_whole
from dataio.world import run_threads, thread_worlds
from tonari.cli import main

CROP = Image("img", crop=RandomResizedCrop(8, scale=(0.02, 0.05)))
SMALL = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
PICTURE = Pillow.fromarray(SMALL).resize((96, 72))


def saved(form: str, picture: Pillow.Image = PICTURE, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


GOOD = saved("JPEG")
CUT = GOOD[: int(len(GOOD) * 0.95)]
SMOOTH = saved("JPEG", PICTURE.resize((300, 200)), quality=90)


def with_thumbnail() -> tuple[bytes, bytes]:
    """A JPEG that holds another in its EXIF; and cut where that one ends."""
    held = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + saved("JPEG", PICTURE.resize((48, 36)))
    head = GOOD[:2] + b"\xff\xe1" + (len(held) + 2).to_bytes(2, "big") + held
    assert head.endswith(b"\xff\xd9")
    return head + GOOD[2:], head


FORMS = {
    "JPEG": GOOD,
    "progressive JPEG": saved("JPEG", progressive=True),
    "gray JPEG": saved("JPEG", PICTURE.convert("L")),
    "CMYK JPEG": saved("JPEG", PICTURE.convert("CMYK")),
    "JPEG with a thumbnail": with_thumbnail()[0],
    "PNG": saved("PNG"),
    "WebP": saved("WEBP"),
    "lossless WebP": saved("WEBP", lossless=True),
    "GIF": saved("GIF"),
    "BMP": saved("BMP"),
    "TIFF": saved("TIFF"),
    "TIFF, LZW": saved("TIFF", compression="tiff_lzw"),
    "PPM": saved("PPM"),
}

MISSING = {
    "cut where its thumbnail ends": with_thumbnail()[1],
    "zeros in place of its end": GOOD[:-900] + bytes(900),
    "many zeros in place of data": SMOOTH[: len(SMOOTH) // 2] + bytes(len(SMOOTH) // 2),
    "its header alone": GOOD[:300],
    "nothing": b"",
    "a page": b"<html>404 Not Found</html>" * 9,
}

UNTIDY = {
    "a tail": GOOD + b"tail" * 999,
    "zeros behind": GOOD + bytes(999),
    "a film behind": with_thumbnail()[0] + b"\0\0\0\x18ftypmp42" + bytes(range(256)) * 9,
    "rubbish before its end": GOOD[:-2] + bytes(19) + GOOD[-2:],
    "MPO": saved("MPO", save_all=True, append_images=[PICTURE]),
    "MPO of which the second is cut": saved("MPO", save_all=True, append_images=[PICTURE])[:-500],
    "PNG without its last chunk": FORMS["PNG"][:-12],
    "PNG with a tail": FORMS["PNG"] + b"tail",
    "GIF without its trailer": FORMS["GIF"][:-1],
    "WebP with a tail": FORMS["WebP"] + b"tail",
}


@pytest.fixture
def tar(tmp_path: Path) -> Callable[..., str]:
    def make(*pictures: bytes, name: str = "a.tar") -> str:
        with tarfile.open(tmp_path / name, "w") as file:
            for number, data in enumerate(pictures):
                info = tarfile.TarInfo(f"s{number}.img")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
        return str(tmp_path / name)

    return make


def opened(source: str, fields: Mapping[str, object], cache: Path, **options: object) -> Loader:
    options = {"batch_size": 1, "reports": Reports(progress=False)} | options
    return Loader(source, fields=fields, cache=cache, **options)  # type: ignore[arg-type]


def trained(loader: Loader, epochs: int = 1) -> list[int]:
    return sorted(
        sample_id
        for _ in loader.epochs(epochs)
        for batch in loader
        for sample_id, weight in zip(batch["sample_id"].tolist(), batch["weight"], strict=True)
        if weight
    )


# ---------------------------------------------------------------------------- found while staging


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Truncated File Read")
@pytest.mark.parametrize("form", FORMS)
def test_a_picture_whose_end_is_missing_is_found_by_its_marks(form: str) -> None:
    whole = FORMS[form]
    for num_bytes in {1, 2, 3, 12, len(whole) // 20, len(whole) // 2, len(whole) - 10}:
        cut = whole[:-num_bytes]
        found = find_suspects(
            np.frombuffer(whole + cut + whole, np.uint8),
            np.array([len(whole), len(cut), len(whole)]),
        )
        assert found == ([0, 1, 2] if form == "PPM" else [1]), num_bytes
        if form in ("PNG", "GIF") and num_bytes <= 12:
            continue  # nothing of the picture is missing, as its decoder finds
        with pytest.raises(FieldError, match="do not decode"):
            check_decodes(memoryview(cut), Image("img"), where="here")


@pytest.mark.parametrize("what", MISSING)
def test_what_is_no_whole_picture_is_found_by_its_marks(what: str) -> None:
    assert not is_whole(memoryview(MISSING[what]))
    with pytest.raises(FieldError, match="do not decode"):
        check_decodes(memoryview(MISSING[what]), Image("img"), where="here")


def test_pictures_that_are_untidy_but_whole_are_staged(tar, tmp_path: Path) -> None:
    with opened(tar(*FORMS.values(), *UNTIDY.values()), {"i": CROP}, tmp_path / "cache") as loader:
        assert trained(loader) == [*range(len(FORMS) + len(UNTIDY))]


@pytest.mark.parametrize("readers", [1, 4])
def test_the_first_epoch_does_not_begin_beside_a_cut_picture(tar, tmp_path, readers: int) -> None:
    source = tar(*FORMS.values(), CUT, *FORMS.values(), *MISSING.values())
    first, num_samples = len(FORMS), 2 * len(FORMS) + 1 + len(MISSING)
    staging = Staging(readers=readers)
    with opened(source, {"i": CROP}, tmp_path / "cache", staging=staging) as loader:
        with pytest.raises(FieldError) as raised:
            next(iter(loader))
    text = str(raised.value)
    assert f"{1 + len(MISSING)} such pictures were staged" in text
    assert (
        f"a.tar, sample {first} of {num_samples}, key 's{first}': sample {first}, field 'i': "
        in text
    )
    assert "image file is truncated" in text
    assert 'on_error="skip"' in text
    assert 'Staging(check="none")' in text


def test_what_was_found_is_known_to_the_next_job(tar, tmp_path: Path) -> None:
    source, cache = tar(GOOD, CUT, GOOD), tmp_path / "cache"
    for _ in range(2):
        with (
            opened(source, {"i": CROP}, cache) as loader,
            pytest.raises(FieldError, match=r"a\.tar, sample 1 of 3.*image file is truncated"),
        ):
            trained(loader)
    with opened(source, {"i": CROP}, cache, on_error="skip") as loader:
        assert trained(loader, epochs=3) == [0, 0, 0, 2, 2, 2]
    fields = {"i": Image("img", crop=CenterCrop(4))}
    with opened(source, fields, cache, staging=Staging(check="none")) as loader:
        assert trained(loader) == [0, 1, 2]
        assert loader.stats()["source_bytes"] == 0


def test_unless_it_is_looked_at_a_cut_picture_is_cropped(tar, tmp_path: Path) -> None:
    fields = {"i": Image("img", crop=CenterCrop(4))}
    staging = Staging(check="none")
    with opened(tar(GOOD, CUT), fields, tmp_path / "cache", staging=staging) as loader:
        assert trained(loader) == [0, 1]


def changed_within(picture: bytes) -> bytes:
    middle = len(picture) // 2
    return picture[:middle] + bytes([picture[middle] ^ 0xFF]) + picture[middle + 1 :]


@pytest.mark.parametrize(
    "damaged",
    [
        changed_within(FORMS["PNG"]),
        SMOOTH[: len(SMOOTH) // 2] + GOOD[-2:],
        FORMS["progressive JPEG"][:1500] + GOOD[-2:],
    ],
    ids=["a byte of a PNG", "a JPEG whose middle is missing", "a progressive one"],
)
def test_every_picture_is_decoded_if_that_is_asked_for(tar, tmp_path: Path, damaged: bytes) -> None:
    source = tar(FORMS["PNG"], damaged)
    assert is_whole(memoryview(damaged))
    one = opened(source, {"i": CROP}, tmp_path / "a", staging=Staging(check="decode"))
    with one as loader, pytest.raises(FieldError, match=r"a\.tar, sample 1 of 2, key 's1': "):
        trained(loader)


@pytest.mark.parametrize("form", FORMS)
def test_the_words_before_a_refused_picture_are_no_picture(form: str) -> None:
    with pytest.raises(FieldError, match="in no format that is known"):
        check_decodes(memoryview(WORDS + FORMS[form]), Image("img"), where="here")


def test_staging_beforehand_names_what_is_not_whole(tar, tmp_path, capsys) -> None:
    source = tar(GOOD, CUT)
    arguments = ["--fields", "i=image:img", "--cache", str(tmp_path / "cache")]
    assert main(["cache", "stage", source, *arguments]) == 1
    assert "sample 1 of 2, key 's1'" in capsys.readouterr().err


def test_an_excluded_picture_is_no_error(tar, tmp_path: Path) -> None:
    source = tar(GOOD, CUT, GOOD, CUT)
    with opened(source, {"i": CROP}, tmp_path / "a", exclude=[1, 3]) as loader:
        assert trained(loader, epochs=2) == [0, 0, 2, 2]
    with (
        opened(source, {"i": CROP}, tmp_path / "b", exclude=[1]) as loader,
        pytest.raises(FieldError, match=r"sample 3 of 4, .* 1 such pictures were staged$"),
    ):
        trained(loader)


def test_a_mask_is_looked_at_too(tar, tmp_path: Path) -> None:
    classes = saved("PNG", Pillow.fromarray(SMALL[..., 0] // 64))
    fields = {"m": Mask("img", crop=CenterCrop(4))}
    with (
        opened(tar(classes, classes[:40]), fields, tmp_path / "a") as loader,
        pytest.raises(FieldError, match=r"a\.tar, sample 1 of 2, key 's1': .* do not decode"),
    ):
        trained(loader)


def test_a_column_of_pictures_is_looked_at_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"img": [GOOD, CUT, b"", GOOD]}), tmp_path / "a.parquet")
    source = str(tmp_path / "a.parquet")
    with (
        opened(source, {"i": CROP}, tmp_path / "a") as loader,
        pytest.raises(FieldError, match=r"a\.parquet, sample 1 of 4: .*is truncated"),
    ):
        trained(loader)
    kept = {"i": Image("img", resize=Resize(8), decoded=True), "size": ImageSize("img")}
    for name, fields in (("b", {"i": CROP}), ("c", kept)):
        with opened(source, fields, tmp_path / name, on_error="skip") as loader:
            assert trained(loader) == [0, 3]


@pytest.mark.parametrize("check", ["overlap", "quota"])
def test_rows_that_come_beside_training_are_looked_at(tar, tmp_path, check: str) -> None:
    source = tar(*[CUT if number == 7 else GOOD for number in range(40)])
    options: dict[str, object] = {"batch_size": 2}
    if check == "overlap":
        options["staging"] = Staging(when="overlap")
    for number, on_error in enumerate(("raise", "skip")):
        cache: object = tmp_path / str(number)
        if check == "quota":
            cache = NodeCache(tmp_path / str(number), quota=120_000)
        with opened(source, {"i": CROP}, cache, on_error=on_error, **options) as loader:  # type: ignore[arg-type]
            if on_error == "raise":
                with pytest.raises(FieldError, match=r"a\.tar, sample 7 of 40"):
                    trained(loader)
            else:
                assert trained(loader) == [number for number in range(40) if number != 7]


def test_rows_that_move_stay_padding(tar, tmp_path: Path) -> None:
    source = tar(*[CUT if number % 5 == 3 else GOOD for number in range(20)])
    fields = {"i": CROP, "kept": Image("img", resize=Resize(8), decoded=True)}

    def on_rank(world) -> list[tuple[int, int]]:
        found = []
        with opened(
            source, fields, tmp_path / str(world.node), world=world, on_error="skip", batch_size=2,
            shuffle=shuffle.Partial(0.5), workers=Workers(threads=0),
        ) as loader:  # fmt: skip
            for epoch in loader.epochs(4):
                for batch in loader:
                    ids, weights = batch["sample_id"].tolist(), batch["weight"].tolist()
                    found += [(epoch, i) for i, w in zip(ids, weights, strict=True) if w]
        return found

    ranks = run_threads(thread_worlds([1, 1], timeout_s=60), on_rank)
    whole = [(epoch, number) for epoch in range(4) for number in range(20) if number % 5 != 3]
    assert sorted(row for rank in ranks for row in rank) == whole


# ---------------------------------------------------------------------------- skip, everywhere

KINDS: dict[str, dict[str, object]] = {
    "of their own size": {"i": Image("img")},
    "cropped": {"i": CROP},
    "decoded": {"i": Image("img", resize=Resize(8), decoded=True)},
    "decoded, cropped anew": {
        "i": Image("img", resize=Resize(16), crop=RandomResizedCrop(8), decoded=True)
    },
    "decoded, with sizes": {
        "i": Image("img", resize=Resize(8), decoded=True), "size": ImageSize("img")
    },
    "sizes": {"size": ImageSize("img")},
}  # fmt: skip


def collated(samples: list[dict[str, object]]) -> dict[str, torch.Tensor]:
    return {"n": torch.full((len(samples),), len(samples))}


def shifted(sample, rng):
    return {name: value + 1 for name, value in sample.items()}


WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "transform": {"transform": shifted},
    "collate": {"collate": collated},
    "batch transform": {"batch_transform": lambda batch, rng: batch},
}


@pytest.mark.parametrize(("threads", "batch_size"), [(0, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_bad_pictures_is_padding(
    tar, tmp_path, caplog, kind, threads, batch_size
) -> None:
    # The first batch has nothing that decodes, whatever the order.
    source = tar(b"", b"", GOOD, b"", GOOD, b"")
    for way, options in WAYS.items():
        one = opened(
            source, KINDS[kind], tmp_path / way, on_error="skip", batch_size=batch_size,
            workers=Workers(threads=threads), **options,
        )  # fmt: skip
        with one as loader:
            assert trained(loader, epochs=2) == [2, 2, 4, 4]
            assert loader.stats()["skipped_rows"] == 8
        said = [each for each in caplog.messages if "is padding in epoch 0" in each]
        assert len(said) == 1, "of each loader, the first"
        assert ".tar" in said[0]
        caplog.clear()


def test_a_batch_of_bad_pictures_is_padding_in_processes_too(tar, tmp_path: Path) -> None:
    source = tar(b"", b"", GOOD, b"")
    one = opened(
        source, KINDS["of their own size"], tmp_path / "a", on_error="skip", transform=shifted,
        workers=Workers(processes=1),
    )  # fmt: skip
    with one as loader:
        assert trained(loader) == [2]


def test_padding_looks_like_a_picture(tar, tmp_path: Path) -> None:
    with opened(tar(b"", GOOD), {"i": Image("img")}, tmp_path / "a", on_error="skip") as loader:
        assert {tuple(batch["i"].shape) for batch in loader} == {(1, 3, 72, 96)}


def test_where_nothing_decodes_skipping_is_an_error(tar, tmp_path: Path) -> None:
    with (
        opened(tar(b"", b""), {"i": Image("img")}, tmp_path / "a", on_error="skip") as loader,
        pytest.raises(FieldError, match=r"none of the 2 rows held there decodes, expected one"),
    ):
        trained(loader)


@pytest.fixture
def evaluating(tar, tmp_path: Path) -> Iterator[Callable[[str], Loader]]:
    loaders = []

    def make(on_error: str) -> Loader:
        fields = {"i": Image("img", resize=Resize(8))}
        source = tar(GOOD, GOOD, name="train.tar")
        loaders.append(opened(source, fields, tmp_path / "cache", on_error=on_error))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("kind", [None, "decoded", "of their own size"])
def test_an_evaluation_skips_as_its_loader_does(tar, evaluating, kind: str | None) -> None:
    fields = {} if kind is None else {"fields": KINDS[kind]}
    source = tar(CUT, GOOD, b"", GOOD, name="test.tar")
    batches = list(evaluating("skip").evaluation(source, **fields))
    assert [bool(batch["valid"]) for batch in batches] == [False, True, False, True]


def test_an_evaluation_names_what_does_not_decode(tar, evaluating) -> None:
    evaluation = evaluating("raise").evaluation(tar(GOOD, CUT, name="test.tar"))
    with pytest.raises(FieldError, match=r"test\.tar, sample 1 of 2, key 's1': sample 1, field"):
        list(evaluation)


def upper_half(sample: dict[str, Any]) -> dict[str, object]:
    return {"i": sample["i"][:8].copy(), "n": np.float32(1)}


@pytest.mark.parametrize("decoded", [False, True])
def test_a_stage_transform_is_not_given_what_does_not_decode(tar, tmp_path, decoded: bool) -> None:
    fields = {"i": Image("img", resize=Resize(16), decoded=decoded)}
    staging = Staging(transform=upper_half)
    source = tar(b"", GOOD, CUT, GOOD)
    with opened(source, fields, tmp_path / "a", staging=staging, on_error="skip") as loader:
        assert trained(loader, epochs=2) == [1, 1, 3, 3]
    # The rows that were refused are known for what they are.
    with (
        opened(source, fields, tmp_path / "a", staging=staging) as loader,
        pytest.raises(FieldError, match=r"a\.tar, sample [02] of 4: .* when it was staged with on"),
    ):
        trained(loader)
    with pytest.raises(FieldError, match=r"a\.tar.* do not decode"):
        opened(source, fields, tmp_path / "b", staging=staging)
