"""Computes decoder layers of any form from the graph of operations that their code makes."""
