"""How well a model does a task whose answers are known: a room a task.

Only `answering` asks an `Encoder` itself. The others take whatever turns texts into numbers (`Read`
in `reading`), so that ours and another library are judged by one and the same code.
"""
