"""A warm start for recorded questions: programs found by search on training questions, taught to a model from nothing.

`programs` searches, `planner` carries a program out as any policy does, `lessons` writes down what it planned in which
prompts, `school` trains a small decoder on them. GRPO then starts from there (policy.train).
"""
