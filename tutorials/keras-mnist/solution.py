"""MNIST in Keras, ported to an accelerator's SDK: every step of the README, done.

    packhorse port solution.py
    packhorse port solution.py --epochs 1

The regions between `# --- solution` and `# --- end` are what `exercise.py` leaves to you.
"""

import argparse

import tensorflow as tf
from mnist_data import load_data

# --- solution 1
from tensorflow.python import ipu

# --- end 1

arguments = argparse.ArgumentParser()
arguments.add_argument("--epochs", type=int, default=3)
args = arguments.parse_args()
batch_size = 64
tf.keras.utils.set_random_seed(30)


# --- solution 2
def make_divisible(count, divisor):
    return count - count % divisor


# --- end 2

(x_train, y_train), (x_test, y_test) = load_data()
x_train, x_test = (x[..., None].astype("float32") / 255 for x in (x_train, x_test))

# --- solution 3
train_length = make_divisible(len(x_train), batch_size)
x_train, y_train = x_train[:train_length], y_train[:train_length]
test_length = make_divisible(len(x_test), batch_size)
x_test, y_test = x_test[:test_length], y_test[:test_length]
# --- end 3

# --- solution 4
config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
# --- end 4

# --- solution 5
strategy = ipu.ipu_strategy.IPUStrategy()
# --- end 5

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
    # --- solution 6
    model.compile(
        optimizer="adam",
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=train_length // batch_size,
    )
    # --- end 6
    model.fit(x_train, y_train, batch_size=batch_size, epochs=args.epochs, verbose=2)
    model.save("mnist.keras")

    # --- solution 7
    model.compile(
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=test_length // batch_size,
    )
    _, accuracy = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
    # --- end 7

print(f"accuracy: {100 * accuracy:.2f} % of {len(x_test)} images")
