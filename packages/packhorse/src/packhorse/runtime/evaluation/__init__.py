"""Evaluation: how well a model does on a task whose answers are known, one module per task.

Only `answering` calls an `Encoder` itself. The others take any function that turns texts into
arrays (`TextReader` in `reading`), so that the same code judges our models and other libraries.
"""
