"""MNIST in Keras, on its way to an accelerator's SDK: seven TODOs are yours.

    packhorse port exercise.py --epochs 1

Replace each `raise` by the lines that its TODO asks for, then run again: the next one tells itself.
The sections of the README have the same numbers. `solution.py` has the answers.
"""

# ruff: noqa: F821 (what is missing is the exercise)

import argparse

import tensorflow as tf
from mnist_data import load_data

# TODO 1: Import TensorFlow's module for the IPU. (`packhorse port` provides it.)
raise NotImplementedError("TODO 1: import the module for the IPU")

arguments = argparse.ArgumentParser()
arguments.add_argument("--epochs", type=int, default=3)
args = arguments.parse_args()
batch_size = 64
tf.keras.utils.set_random_seed(30)


# TODO 2: Write `make_divisible(count, divisor)`: the largest number up to `count` that `divisor`
# divides.
raise NotImplementedError("TODO 2: write make_divisible")

(x_train, y_train), (x_test, y_test) = load_data()
x_train, x_test = (x[..., None].astype("float32") / 255 for x in (x_train, x_test))

# TODO 3: Cut the training data to `train_length` and the test data to `test_length`, numbers that
# the batch size divides.
raise NotImplementedError("TODO 3: make the data divisible by the batch size")

# TODO 4: Configure the system: one IPU, selected by itself.
raise NotImplementedError("TODO 4: configure the system")

# TODO 5: Make the `strategy` whose scope the model is built in.
raise NotImplementedError("TODO 5: make the strategy")

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(2),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(2),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dropout(0.5),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    # TODO 6: Compile the model (adam, sparse_categorical_crossentropy, accuracy); let one call run
    # all steps of an epoch.
    raise NotImplementedError("TODO 6: compile the model")
    model.fit(x_train, y_train, batch_size=batch_size, epochs=args.epochs, verbose=2)
    model.save("mnist.keras")

    # TODO 7: Compile once more, with as many steps per call as the test data has, and evaluate: the
    # second result is the `accuracy`.
    raise NotImplementedError("TODO 7: evaluate the model")

print(f"accuracy: {100 * accuracy:.2f} % of {len(x_test)} images")
