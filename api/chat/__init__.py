"""Chat: from a conversation to a prompt and a grammar, and from output tokens to reasoning, text
and tool calls.

``prepare`` is the entry point for every chat API (chat completions, Messages, Responses, Ollama's
chat). It renders the prompt with the model's template (``rendering``, ``tool_form``) and plans
reasoning and calls (``thoughts``, ``tool_plan``). ``DialogueChoice`` converts output tokens to
deltas: it splits them at the model's tags (``text.splitter``) or channels
(``text.harmony_splitter``), and parses calls while they form (``calls``). ``sections`` groups the
deltas for APIs whose replies are lists of items. Everything runs on the API process's event loop,
except that templates are rendered, and large conversations converted, in threads. The package must
not import MLX, the cache or the scheduler.
"""
