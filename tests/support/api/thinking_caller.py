"""A scripted model that thinks and calls functions."""

from __future__ import annotations

from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info

from chairlift.engine.messages import Submit

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for tool_call in m.tool_calls or [] %}"
    "{% set tool_call = tool_call.function %}"
    '<tool_call>\n{"name": "{{ tool_call.name }}", '
    '"arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOKENIZER = byte_tokenizer(TEMPLATE, plain=MARKS)
WEATHER = "get_weather"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
THOUGHT, TEXT = "It asks for two.", "Let me see."
CITIES = ("Zürich", "Bern")
_CALLS = "\n".join(
    f'<tool_call>\n{{"name": "{WEATHER}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in CITIES
)
CALLING = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{_CALLS}"
ANSWER = "Sunny in both."


def thinking_caller() -> FakeEngine:
    """An engine that thinks, writes a text and calls twice; after the results, it answers."""

    def script(request: Submit, index: int) -> Scripted:
        has_results = "sunny" in TOKENIZER.decode(request.prompt)
        tokens = TOKENIZER.encode(ANSWER if has_results else CALLING, add_special_tokens=False)
        return Scripted([*tokens, TOKENIZER.eos_token_id], ended_by_token=True)

    return FakeEngine(model_info(vocab_size=len(TOKENIZER)), script)
