"""Chat templates, messages, and a tokenizer with one token per character that renders them."""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from Gradient_evaluation.utils import format_prompt

BOS, EOS = "<s>", "</s>"
PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOS_TEMPLATE = "{{ bos_token }}" + PLAIN_TEMPLATE
DATED = "Today is {{ strftime_now('%d %b %Y') }}.\n" + PLAIN_TEMPLATE
LLAMA_3 = (
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "Today is {{ date_string }}.\n" + PLAIN_TEMPLATE
)
USES_TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{{ '\n' }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content is not none %}{{ m['content'] }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "{% if 'tool_call_id' in m %}({{ m.tool_call_id }} of {{ m.name }}){% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}{% endif %}"
)

USER = [{"role": "user", "content": "2+3?"}]
CHAT = "[user]2+3?\n[assistant]"
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CALLED = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
]


def tiny_tokenizer(adds: str = "", template: str | None = None, bos: str | None = BOS) -> PreTrainedTokenizerFast:
    """One token per character. ``adds``: the post-processor's pattern, such as "<s> $A </s>"."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate([BOS, EOS, "<unk>", "<x>", *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.add_special_tokens([BOS, EOS, "<unk>", "<x>"])
    if adds:
        special = [(token, vocabulary[token]) for token in (BOS, EOS, "<x>")]
        core.post_processor = processors.TemplateProcessing(single=adds, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=EOS, unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def shown(tokenizer, prompt) -> str:
    """The text that the model sees."""
    return "".join(tokenizer.convert_ids_to_tokens(format_prompt(tokenizer, prompt)))
