"""A run: questions to requests, answers to a journal, progress, budget, resume."""
