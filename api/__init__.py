"""The HTTP APIs of OpenAI, Anthropic, Ollama and llama.cpp, and the ``chairlift`` command.

This package validates a request, renders its chat template and tokenizes it, submits the token ids
to the engine client, and replies with the output tokens as text, in one body or as server-sent
events.
"""
