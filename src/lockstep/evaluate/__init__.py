"""Measures a model through a Completer: tasks, verifiers, error bars and paired tests. No torch."""
