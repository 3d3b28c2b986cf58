"""Documents, shares and streams: what is agreed on by hash must come out the same everywhere and every time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from geo_diloco.errors import DataError
from geo_diloco.manifest import DataSpec
from geo_diloco.training.data import TokenStream, documents, heldout_batches, share_of, share_tokens


def make_spec(folder: Path, **changes: object) -> DataSpec:
    values: dict[str, object] = {"source": str(folder), "sequence_length": 8, "batch_size": 2, "num_shares": 3}
    return DataSpec(**(values | {"heldout_share": 0.2} | changes))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(40):
        path = tmp_path / f"part{number % 4}" / f"text{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"document {number}: " + "abcdefgh" * (5 + number % 7), "utf-8")
    (tmp_path / "picture.png").write_bytes(b"not text")
    return tmp_path


def take(stream: TokenStream, number: int) -> list[torch.Tensor]:
    batches: Iterator[torch.Tensor] = islice(stream, number)
    return list(batches)


def test_every_document_is_in_exactly_one_share_or_held_out(folder: Path) -> None:
    spec = make_spec(folder)
    shares = [share_tokens(spec, share) for share in (0, 1, 2)]
    heldout = share_tokens(spec, "heldout")
    num_bytes = sum(len(path.read_bytes()) + 1 for path in folder.rglob("*.txt"))
    assert sum(len(part) for part in (*shares, heldout)) == num_bytes
    for document in documents(spec):
        text = document.read()
        holders = [part for part in (*shares, heldout) if text in part.tobytes()]
        assert len(holders) == 1, document.name


def test_a_documents_share_depends_on_its_name_and_not_on_its_neighbours(folder: Path) -> None:
    spec = make_spec(folder)
    before = {document.name: share_of(document.name, spec) for document in documents(spec)}
    (folder / "part1" / "added.txt").write_text("more", "utf-8")
    (folder / "part2" / "text2.txt").unlink()
    after = {document.name: share_of(document.name, spec) for document in documents(spec)}
    assert {name: after[name] for name in before if name in after} == {n: s for n, s in before.items() if n in after}
    assert share_of("part0/text0.txt", spec) == before["part0/text0.txt"]


def test_heldout_share_is_about_what_the_manifest_says() -> None:
    spec = DataSpec(heldout_share=0.05, num_shares=8)
    where = [share_of(f"name{number}", spec) for number in range(20_000)]
    assert 0.04 < where.count("heldout") / len(where) < 0.06
    assert all(0.10 < where.count(share) / len(where) < 0.14 for share in range(8))


def test_no_document_is_held_out_at_share_zero() -> None:
    spec = DataSpec(heldout_share=0.0)
    assert not any(share_of(f"name{number}", spec) == "heldout" for number in range(5_000))


def test_a_stream_taken_up_at_its_cursor_goes_on_with_the_same_batches(folder: Path) -> None:
    spec = make_spec(folder)
    whole = take(TokenStream(spec, share=0), 60)  # more than once through the share
    stream = TokenStream(spec, share=0)
    take(stream, 23)
    again = take(TokenStream(spec, share=0, cursor=stream.cursor), 37)
    assert all(torch.equal(a, b) for a, b in zip(whole[23:], again, strict=True))


def test_a_batchs_numel_is_what_the_cursor_advances_by(folder: Path) -> None:
    stream = TokenStream(make_spec(folder), share=1, cursor=16)
    batch = stream.next_batch()
    assert batch.shape == (2, 8) and batch.dtype == torch.int64
    assert stream.cursor == 16 + batch.numel()


def test_a_cursor_inside_a_window_never_repeats_it(folder: Path) -> None:
    spec = make_spec(folder)
    expected = take(TokenStream(spec, share=0, cursor=24), 1)[0]
    assert torch.equal(take(TokenStream(spec, share=0, cursor=17), 1)[0], expected)


def test_once_through_a_share_visits_every_window_once(folder: Path) -> None:
    spec = make_spec(folder, batch_size=1)
    tokens = share_tokens(spec, 0)
    windows = sorted(tuple(tokens[i : i + 8].tolist()) for i in range(0, len(tokens) // 8 * 8, 8))
    seen = sorted(tuple(batch[0].tolist()) for batch in take(TokenStream(spec, share=0), len(windows)))
    assert seen == windows


def test_another_pass_visits_the_same_windows_in_another_order(folder: Path) -> None:
    spec = make_spec(folder, batch_size=1)
    num_windows = len(share_tokens(spec, 0)) // 8
    first = [tuple(batch[0].tolist()) for batch in take(TokenStream(spec, share=0), num_windows)]
    second = [tuple(batch[0].tolist()) for batch in take(TokenStream(spec, share=0, pass_number=1), num_windows)]
    assert first != second and sorted(first) == sorted(second)


def test_heldout_sequences_are_in_no_share(folder: Path) -> None:
    spec = make_spec(folder)
    shares = b"".join(share_tokens(spec, share).tobytes() for share in range(3))
    batches = heldout_batches(spec, 4)
    assert sum(len(batch) for batch in batches) == 4
    joined = share_tokens(spec, "heldout").tobytes()
    for row in torch.cat(batches):
        assert bytes(row.tolist()) in joined
    names = [document.read() for document in documents(spec) if share_of(document.name, spec) == "heldout"]
    assert names and not any(text in shares for text in names)


def test_heldout_asks_for_no_more_than_there_is(folder: Path) -> None:
    spec = make_spec(folder)
    num_windows = len(share_tokens(spec, "heldout")) // 8
    assert sum(len(batch) for batch in heldout_batches(spec, 10**6)) == num_windows


def test_jsonl_rows_are_documents_and_blank_lines_are_not(tmp_path: Path) -> None:
    rows = [json.dumps({"body": f"row {number}"}) for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(rows) + "\n", "utf-8")
    found = {d.name: d.read() for d in documents(make_spec(tmp_path, text_field="body"))}
    assert found == {"rows.jsonl#0": b"row 0", "rows.jsonl#2": b"row 1", "rows.jsonl#4": b"row 2"}


@pytest.mark.parametrize("line", ["{broken", '{"other": "x"}', '{"text": 7}', "[]"])
def test_a_bad_jsonl_row_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n' + line + "\n", "utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2"):
        [document.read() for document in documents(make_spec(tmp_path))]


def test_parquet_rows_are_documents_and_empty_ones_are_not(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one", "", None, "four"], "other": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    found = {d.name: d.read() for d in documents(make_spec(tmp_path))}
    assert found == {"rows.parquet#0": b"one", "rows.parquet#3": b"four"}


def test_a_parquet_file_without_the_column_or_damaged_is_refused_by_name(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column data\.text_field = 'text'; it has body"):
        list(documents(make_spec(tmp_path)))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file"):
        list(documents(make_spec(tmp_path)))


def test_a_glob_names_documents_by_their_path_below_its_fixed_part(folder: Path) -> None:
    by_glob = [document.name for document in documents(make_spec(folder, source=str(folder / "part[01]" / "*.txt")))]
    assert by_glob and all(name.startswith(("part0/", "part1/")) for name in by_glob)


def test_data_dir_takes_the_place_of_the_manifests_folder(folder: Path) -> None:
    elsewhere = make_spec(Path("/nowhere/at/all"))
    here = [document.name for document in documents(make_spec(folder))]
    assert [document.name for document in documents(elsewhere, data_dir=folder)] == here


@pytest.mark.parametrize("source", ["~nobody-here/texts", "x" * 5000, "["])
def test_a_source_that_names_nothing_is_a_data_error_that_repeats_it(source: str) -> None:
    with pytest.raises(DataError, match=r"^data\.source = '" + re.escape(source[:9])):
        list(documents(make_spec(Path("unused"), source=source)))


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    document = next(documents(make_spec(tmp_path)))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt: No such file"):
        document.read()


def test_rows_nested_without_end_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: not JSON"):
        next(documents(make_spec(tmp_path))).read()


def test_a_column_of_numbers_is_no_text(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2, 3]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"column data\.text_field = 'text' holds int64, not text"):
        list(documents(make_spec(tmp_path)))


def test_a_parquet_file_with_damage_inside_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"document {i}" for i in range(5000)]}), path)
    data = bytearray(path.read_bytes())
    data[100:4000] = b"\xff" * 3900
    path.write_bytes(data)
    with pytest.raises(DataError, match="not a readable parquet file"):
        list(documents(make_spec(tmp_path)))


def test_tokens_beyond_the_models_vocabulary_are_refused_before_training(folder: Path) -> None:
    spec = make_spec(folder)
    TokenStream(spec, share=0, vocabulary=256)
    with pytest.raises(DataError, match=r"gives token \d+, the model has 50: model\.config\.vocab_size"):
        TokenStream(spec, share=0, vocabulary=50)


def test_no_documents_is_a_data_error_that_names_the_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source.*no training data"):
        list(documents(make_spec(tmp_path)))
    with pytest.raises(DataError, match="--data-dir"):
        list(documents(make_spec(tmp_path), data_dir=tmp_path / "missing"))


def test_a_share_without_documents_or_too_short_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("short", "utf-8")
    spec = make_spec(tmp_path, num_shares=1, heldout_share=0.0)
    with pytest.raises(DataError, match="fewer than one sequence"):
        TokenStream(spec, share=0)
    with pytest.raises(DataError, match="too few documents"):
        heldout_batches(spec, 4)


def test_an_unknown_tokenizer_is_a_data_error(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer = 'wordpiece'"):
        share_tokens(make_spec(folder, tokenizer="wordpiece"), 0)


def test_a_tokenizer_folder_gives_its_ids_and_ends_each_document(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<end>": 1, "document": 2}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    where = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>").save_pretrained(where)
    spec = make_spec(folder, tokenizer=str(where))
    num_documents = sum(share_of(document.name, spec) == 0 for document in documents(spec))
    assert share_tokens(spec, 0).tolist() == [2, 0, 0, 1] * num_documents


def test_the_standard_library_is_found_and_is_enough_for_the_demo() -> None:
    spec = DataSpec()
    sizes = [len(share_tokens(spec, share)) for share in range(spec.num_shares)]
    assert min(sizes) > 500_000
    assert sum(len(batch) for batch in heldout_batches(spec, 64)) == 64
    assert not any("site-packages" in document.name or "/test/" in document.name for document in documents(spec))
