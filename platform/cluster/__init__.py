"""Execution of a plan: the driver of a run, from its start (`driver.py`) to the one place where every run ends
(`endings.py`). Its run directory, resources and shown commands are here too, and `AskedModel`, a trained model whose
workers are asked for answers and scores. Nothing here computes a tensor.

Its files in reading order: driver, endings, run_directory, origin, resources, shown_commands, callbacks, session,
asked_model, harness_tasks, answer_scores, cluster_check, calibration_run.
"""
