"""Chat templates of models that have none, with the results of mlx-vlm's formats."""

from __future__ import annotations

from pkgutil import resolve_name

_MLX_VLM = "mlx_vlm.models."
# mlx-vlm adds BOS to it afterwards.
PLAIN = (
    "{%- if messages | length == 1 and messages[0]['role'] == 'user' -%}"
    "{{ messages[0]['content'] }}"
    "{%- else -%}"
    "{%- for message in messages -%}"
    "{{ message['role'] | capitalize }}:"
    "{% if message['content'] %} {{ message['content'] }}{% endif %}"
    "{% if add_generation_prompt or not loop.last %}{{ '\n' }}{% endif %}"
    "{%- endfor -%}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
    "{%- endif -%}"
)
CONTENTS = "{{ bos_token }}{{ messages | map(attribute='content') | join(' ') }}"
LAST = "{{ messages[-1]['content'] }}"
LINES = "{{ messages | map(attribute='content') | join('\n') }}"
DEEPSEEK = (
    "{{ bos_token }}"
    "{%- set names = {'user': '<|User|>:', 'assistant': '<|Assistant|>'} -%}"
    "{%- for message in messages -%}"
    "{{ names.get(message['role'], '') + ' ' + message['content'] + '\n\n' }}"
    "{%- endfor -%}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)
# The name of one that mlx-vlm has itself.
DEEPSEEK_V41 = f"{_MLX_VLM}deepseek_v41.processing_deepseek_v41.DEFAULT_CHAT_TEMPLATE"


def resolved(template: str) -> str:
    """A template, or the one that mlx-vlm has under this name."""
    if not template.startswith(_MLX_VLM):
        return template
    found: str = resolve_name(template)
    return found
