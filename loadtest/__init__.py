"""The load test: sends a workload to any OpenAI-compatible server, times every chunk of every reply
from the client's side, and checks that no greedy reply depends on who else was in the batch."""
