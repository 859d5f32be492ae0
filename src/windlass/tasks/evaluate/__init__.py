"""Evaluation of anything that is a Client: tasks as data, a run that resumes, a sandbox for generated code, reports."""
