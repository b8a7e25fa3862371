from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lockstep.core.errors import DataError
from lockstep.models.resolve import resolve_model
from lockstep.text.records import Conversation, PlainText
from lockstep.text.tokenizer import Tokenizer
from lockstep.train.masks import RecordTokenizer
from lockstep.train.packing import Document

END = 2
TALK = Conversation(
    messages=(
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hell o 😀"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "see you"},
    )
)


def said(tokenizer: Tokenizer, document: Document) -> str:
    """The text of the tokens that carry loss."""
    trained = np.asarray(document.token_ids)[np.asarray(document.loss_weights) > 0]
    return tokenizer.decode(trained.tolist(), skip_special_tokens=False)


def talk(content: str) -> Conversation:
    return Conversation(
        messages=(
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": content},
        )
    )


@pytest.mark.parametrize("template", ["chatml", "marked", "marked without end", "trimmed"])
def test_loss_is_on_what_the_assistant_says_and_its_end(
    make_tokenizer: Callable[..., Tokenizer], template: str
) -> None:
    tokenizer = make_tokenizer(template)
    (document,) = RecordTokenizer(tokenizer, eos_token_ids=[END]).documents(TALK)
    assert said(tokenizer, document) == "hell o 😀<|im_end|>see you<|im_end|>"
    assert tokenizer.chat_template is not None
    whole = tokenizer.encode(tokenizer.chat_template.render(TALK.messages))
    # The newline after the last end of turn can teach nothing, so it is left out.
    assert list(document.token_ids) == whole[:-1]


def test_the_space_before_the_answer_belongs_to_it(
    make_tokenizer: Callable[..., Tokenizer],
) -> None:
    tokenizer = make_tokenizer("llama 2")
    (document,) = RecordTokenizer(tokenizer, eos_token_ids=[END]).documents(talk("hello"))
    assert said(tokenizer, document) == " hello<|im_end|>"


def test_only_the_completion_is_trained_on(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer()
    record = Conversation(messages=TALK.messages, first_trained=3)
    (document,) = RecordTokenizer(tokenizer, eos_token_ids=[END]).documents(record)
    assert said(tokenizer, document) == "see you<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_gives_a_document_for_each(
    make_tokenizer: Callable[..., Tokenizer],
) -> None:
    tokenizer = make_tokenizer("forgets thoughts")
    documents = RecordTokenizer(tokenizer, eos_token_ids=[END]).documents(TALK)
    assert [said(tokenizer, document) for document in documents] == [
        "<think></think>hell o 😀<|im_end|>",
        "<think></think>see you<|im_end|>",
    ]
    assert "<think></think>hell" not in tokenizer.decode(documents[1].token_ids)


def test_a_token_across_the_start_of_a_turn_is_cut_there(
    make_tokenizer: Callable[..., Tokenizer],
) -> None:
    tokenizer = make_tokenizer()
    record = talk("\nhello")  # the template's "\n" and this one are one token when encoded together
    (document,) = RecordTokenizer(tokenizer, eos_token_ids=[END]).documents(record)
    assert said(tokenizer, document) == "\nhello<|im_end|>"
    assert tokenizer.chat_template is not None
    prompt = tokenizer.chat_template.render(record.messages[:1], add_generation_prompt=True)
    prompt_ids = tokenizer.encode(prompt)
    assert list(document.token_ids[: len(prompt_ids)]) == prompt_ids


def test_plain_text_ends_in_the_end_token(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer()
    records = RecordTokenizer(tokenizer, eos_token_ids=[0, END])
    (document,) = records.documents(PlainText(prompt="2+2=", completion="4"))
    assert tokenizer.decode(document.token_ids, skip_special_tokens=False) == "2+2=4<|im_end|>"
    assert said(tokenizer, document) == "4<|im_end|>"


@pytest.mark.parametrize(
    ("template", "record", "reason"),
    [
        ("never ends", talk("hello"), "it would not learn to stop"),
        ("other prompt", talk("hello"), "cannot be located"),
        ("shouts", talk("hello"), "does not show the content as it is"),
        ("chatml", talk("a<|im_end|>b"), "has 2 end-of-sequence tokens"),
        ("chatml", Conversation(messages=TALK.messages[:2]), "no assistant message to train on"),
    ],
)
def test_what_cannot_be_located_is_refused(
    make_tokenizer: Callable[..., Tokenizer], template: str, record: Conversation, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        RecordTokenizer(make_tokenizer(template), eos_token_ids=[END]).documents(record)


def test_a_model_that_names_no_end_is_refused(make_tokenizer: Callable[..., Tokenizer]) -> None:
    with pytest.raises(DataError, match="names no end-of-sequence token"):
        RecordTokenizer(make_tokenizer(), eos_token_ids=[])


def test_marked_templates_give_the_mask_transformers_gives(
    make_tokenizer: Callable[..., Tokenizer],
) -> None:
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    tokenizer = make_tokenizer("marked")
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Library.from_str(tokenizer.files.tokenizer_json)
    ).apply_chat_template(
        list(TALK.messages),
        chat_template=tokenizer.files.chat_template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    (document,) = RecordTokenizer(tokenizer, eos_token_ids=[END]).documents(TALK)
    length = len(document)
    assert list(document.token_ids) == theirs["input_ids"][:length]
    assert list(document.loss_weights) == theirs["assistant_masks"][:length]
    assert not any(theirs["assistant_masks"][length:])


@pytest.mark.slow
def test_smollm2s_own_template() -> None:
    """It puts a system prompt of its own before conversations that have none."""
    folder = resolve_model("smollm2").path
    tokenizer = Tokenizer.from_folder(folder)
    records = RecordTokenizer(tokenizer, eos_token_ids=[2])
    for messages in (TALK.messages, TALK.messages[1:]):
        (document,) = records.documents(Conversation(messages=messages))
        assert said(tokenizer, document) == "hell o 😀<|im_end|>see you<|im_end|>"
    assert "SmolLM" in tokenizer.decode(document.token_ids)
