"""Text in and out of models: tokenizers, chat templates, streaming detokenisation. Never imports
torch.
"""

from lockstep.text.chat_template import ChatTemplate, RenderedChat
from lockstep.text.detokenizer import IncrementalDetokenizer, StopMatcher
from lockstep.text.tokenizer import TokenizedText, Tokenizer, TokenizerFiles

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "RenderedChat",
    "StopMatcher",
    "TokenizedText",
    "Tokenizer",
    "TokenizerFiles",
]
