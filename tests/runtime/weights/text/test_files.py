"""Tokenizer, template, stops and defaults of every format, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.errors import BadInput
from windlass.model.formats.dllama.tokenizer import DllamaTokenizer, write_tokenizer
from windlass.model.formats.gguf.header import read_header
from windlass.model.text.chat.template import render_chat
from windlass.model.text.tokenize import gguf_tokenizer
from windlass.runtime.weights.text.files import ModelText, SamplingDefaults, model_text
from windlass.tasks.convert.dllama.vocabulary import read_hugging_face

pytestmark = pytest.mark.pure

pytest.importorskip("tokenizers")

SENTENCES = (Path(__file__).parents[3] / "model" / "text" / "sentences.txt").read_text().splitlines()
CHAT = "<|im_start|>user\nHow high is the sky?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def directory(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer as a Hugging Face directory has it."""
    folder = tmp_path_factory.mktemp("smollm2")
    gguf_tokenizer.write_tokenizer(read_header(smollm2).metadata, folder)
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    return folder


@pytest.fixture(scope="module")
def dllama(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dllama")
    write_tokenizer(folder / "dllama_tokenizer_smollm2_q40.t", read_hugging_face(directory)[0])
    (folder / "dllama_model_smollm2_q40.m").write_bytes(b"")
    return folder / "dllama_model_smollm2_q40.m"


def test_no_torch_is_imported(smollm2: Path) -> None:
    check = f"""
import sys
from pathlib import Path
from windlass.runtime.weights.text.files import model_text
model_text(Path({str(smollm2)!r})).tokenizer.encode("x")
assert not {{"torch", "numpy", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", check], check=True)


def test_all_formats_of_one_model_agree(smollm2: Path, directory: Path, dllama: Path) -> None:
    found = [model_text(path) for path in (smollm2, directory, dllama)]
    assert {one.stop_ids for one in found} == {(2,)}
    assert {one.special_tokens["eos_token"] for one in found} == {"<|im_end|>"}
    assert len({one.chat_template for one in found}) == 1
    for one in found:
        assert one.tokenizer.encode(CHAT, special=False)[0] == 1
        assert one.tokenizer.decode(one.tokenizer.encode(CHAT, special=False), skip_special=False) == CHAT


def test_dllama_splits_as_the_original_nearly_always(directory: Path, dllama: Path) -> None:
    """The file has no rule for where text is cut, so a few sentences may come out otherwise; the text is always the same."""
    original, ours = model_text(directory).tokenizer, model_text(dllama).tokenizer
    for sentence in SENTENCES:
        assert ours.decode(ours.encode(sentence)) == sentence
    equal = sum(original.encode(sentence) == ours.encode(sentence) for sentence in SENTENCES)
    assert equal >= 0.9 * len(SENTENCES)


def test_the_template_renders(smollm2: Path) -> None:
    found = model_text(smollm2)
    assert found.chat_template is not None
    text = render_chat(found.chat_template, [{"role": "user", "content": "Hi"}], special_tokens=found.special_tokens)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def with_files(directory: Path, folder: Path, **files: object) -> ModelText:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((directory / name).read_bytes())
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "config.json").touch()
    return model_text(folder)


def test_generation_config_has_the_first_word(directory: Path, tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 0], "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_length": 5}
    found = with_files(directory, tmp_path, generation_config__json=generation, config__json={"eos_token_id": 9})
    assert found.stop_ids == (7, 0, 2), "those it lists, and the tokenizer's own end"
    assert found.defaults == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)


def test_greedy_models_say_so(directory: Path, tmp_path: Path) -> None:
    found = with_files(directory, tmp_path, generation_config__json={"do_sample": False}, config__json={"eos_token_id": 9})
    assert found.defaults == SamplingDefaults(temperature=0.0)
    assert found.stop_ids == (9, 2)


def test_a_template_in_a_file_of_its_own(directory: Path, tmp_path: Path) -> None:
    assert (
        with_files(directory, tmp_path, chat_template__jinja="{{ messages }}", config__json={}).chat_template == "{{ messages }}"
    )


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        (("config.json",), "has no tokenizer.json.*Copy it from"),
        (("config.json", "tokenizer.model"), "tokenizer.model alone is not supported"),
        (("a.m",), "there is no .t file next to it; save it as a.t"),
        (("a.m", "one.t", "two.t"), "none of the 2 .t files"),
        (("a.m", "b.m"), "holds 2 models"),
    ],
)
def test_a_missing_tokenizer_is_one_clear_line(tmp_path: Path, files: tuple[str, ...], wrong: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(BadInput, match=wrong) as error:
        model_text(tmp_path)
    assert "\n" not in str(error.value)


def test_bytes_and_letters_that_are_the_same_are_told_apart() -> None:
    """As in SentencePiece: a token for every byte, and tokens for letters after them."""
    from windlass.runtime.weights.text.dllama import special_ids, tokenizer_json

    vocabulary = [
        b"<unk>",
        b"<s>",
        b"</s>",
        *(bytes([byte]) for byte in range(256)),
        b"a",
        b"b",
        b"ab",
        b" ",
        b"\n",
        "é".encode(),
    ]
    stored = DllamaTokenizer(
        vocabulary=vocabulary,
        scores=[-float(number) for number in range(len(vocabulary))],
        bos_id=1,
        eos_ids=(2,),
        max_token_length=5,
    )
    assert special_ids(stored) == [0, 1, 2]
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(stored)))
    text = "ab b\né ü"
    assert backend.encode(text).ids[:4] == [1, 261, 262, 260]
    assert backend.decode(backend.encode(text).ids) == text
    for number in range(3, len(vocabulary)):
        assert backend.decode([number]).encode() in (vocabulary[number], "�".encode())


def test_a_template_that_is_no_text_is_said(tmp_path: Path, directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(BadInput, match=r"chat_template\.jinja is not UTF-8"):
        model_text(tmp_path)
