"""Chat templates: the text that transformers makes, and no way out of the sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windlass.errors import BadInput
from windlass.model.formats.gguf.header import read_header
from windlass.model.text.chat.template import chat_template, render_chat, special_tokens
from windlass.model.text.tokenize.gguf_tokenizer import tokenizer_files, write_tokenizer

pytestmark = pytest.mark.cpu

pytest.importorskip("jinja2")

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Wie geht's? \n"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2 <b>&"}, {"role": "user", "content": "你好"}],
]


@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_chats_equal_transformers(smollm2: Path, tmp_path: Path, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    metadata = read_header(smollm2).metadata
    write_tokenizer(metadata, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    config = tokenizer_files(metadata)["tokenizer_config.json"]
    template = chat_template(config)
    assert template is not None
    for chat in CHATS:
        ours = render_chat(template, chat, add_generation_prompt=prompt, special_tokens=special_tokens(config))
        assert ours == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)


# What published templates use beyond plain Jinja, each against transformers.
TEMPLATES = {
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(ensure_ascii=False, indent=2) }}",
    "trimmed blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content }}]\n    {% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "methods of text": "{{ messages[0].content.strip().split('t')[0].upper() }}",
    "namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}",
    "tools": "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% else %}none{% endif %}",
    "variables": "{{ 'on' if enable_thinking is defined and enable_thinking else 'off' }}{{ bos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_extras_equal_transformers(template: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    variables = {"enable_thinking": True, "bos_token": "<s>"}
    for chat in CHATS:
        expected, _ = utils.render_jinja_template([chat], tools=tools, chat_template=template, **variables)
        ours = render_chat(template, chat, tools=tools, add_generation_prompt=False, **variables)
        assert ours == expected[0]


def test_the_date_is_there() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", []).startswith("2")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'file' %}",
        "{{ 1 / 0 }}",
        "{{ range(99999999) | list }}",
    ],
)
def test_what_goes_wrong_is_one_clear_line(template: str) -> None:
    with pytest.raises(BadInput, match="chat template") as caught:
        render_chat(template, [{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_templates_are_found_by_name() -> None:
    config = {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}
    assert (chat_template(config), chat_template(config, "rag"), chat_template(config, "none")) == ("a", "b", None)
    assert chat_template({}) is None


def test_special_tokens_may_be_objects() -> None:
    assert special_tokens({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }


@pytest.mark.parametrize("template", ["{% break %}", "{% continue %}", "{% for %}"])
def test_a_template_that_is_none_is_said(template: str) -> None:
    with pytest.raises(BadInput, match="the chat template is invalid"):
        render_chat(template, [])
