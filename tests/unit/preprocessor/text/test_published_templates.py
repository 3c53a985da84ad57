"""Chat templates as models publish them, with the marked ones made for training: those that come with `trl`.

They are not shipped here: `pip install --no-deps trl` beside the project, and `make test-slow` compares them all.
"""

from __future__ import annotations

import datetime
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from headrace.preprocessor.text.tokenizer_template import TokenizerTemplate
from headrace.quarantine import BadSampleError
from headrace.sample import LABEL_IGNORED
from tests.unit.preprocessor.text.random_chats import Abilities, Chats
from tests.unit.preprocessor.text.test_chat_templates import Family, in_parts, ours, sample_of, write_folder

transformers = pytest.importorskip("transformers")

TRL = importlib.util.find_spec("trl")
TEMPLATES = sorted(Path(TRL.origin or "").parent.glob("chat_templates/*.jinja")) if TRL else []
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<bos>", "<eos>",
    "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<image>", "<|image|>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|user|>",
    "<|assistant|>", "<|system|>", "<|end|>", "<|observation|>", "[gMASK]", "<sop>", "<|start|>", "<|message|>", "<|channel|>",
    "<|call|>", "<|return|>", "<｜User｜>", "<｜Assistant｜>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|turn>",
    "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<end_of_utterance>", "<fake_token_around_image>",
    "<global-img>",
)  # fmt: skip
NUMBER = 1000
TODAY = "2024-07-26"
KNOWN = ("so that nobody can say what is to be learnt", "has no place in a template")
"""What is refused that `transformers` takes."""


class _Today(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Today:
        return cls.fromisoformat(TODAY)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_tokens_and_loss_are_those_of_transformers(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats that `transformers` refuses are refused here too, and those whose loss a template does not tell are only here."""
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", _Today)
    source = path.read_text(encoding="utf-8")
    family = Family(special=SPECIAL, bos="<bos>", eos="<|im_end|>")
    template = ours(write_folder(tmp_path, family, source), today=TODAY)
    assert isinstance(template, TokenizerTemplate)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    abilities = Abilities(tools="tools" in source, thoughts="reasoning_content" in source, calls_at_once=1)
    chats, seen = Chats(5, abilities), Counter[str]()
    while seen["equal"] < NUMBER and seen.total() < 3 * NUMBER:
        chat = chats.draw()
        messages = in_parts(chat.messages) if path.stem.startswith(("smolvlm", "idefics", "llava")) else chat.messages
        try:
            given = theirs.apply_chat_template(
                messages, tools=chat.tools, return_dict=True, return_assistant_tokens_mask="{%- generation" in source
            )
        except Exception as err:
            with pytest.raises(BadSampleError):
                template.render(sample_of(chat.messages, chat.tools), [])
            seen[type(err).__name__] += 1
            continue
        try:
            sequence = template.render(sample_of(chat.messages, chat.tools), [])
        except BadSampleError as err:
            seen[next((reason for reason in KNOWN if reason in err.detail), err.detail)] += 1
            continue
        assert sequence.input_ids.tolist() == given["input_ids"]
        if "assistant_masks" in given:
            mask, place = [bool(learnt) for learnt in given["assistant_masks"]], 0
            for _, count in template.encoder.pieces(given["input_ids"]):  # theirs ends within a character of several tokens
                mask[place : place + count] = [any(mask[place : place + count])] * count
                place += count
            assert (sequence.labels != LABEL_IGNORED).tolist()[1:] == mask[1:]
        seen["equal"] += 1
    assert seen["equal"] > NUMBER / 2, seen
    assert seen.keys() <= {"equal", "TemplateError", *KNOWN}
