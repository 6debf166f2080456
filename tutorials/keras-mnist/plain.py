"""MNIST in plain Keras: where the port begins.

A small convolutional network learns to read digits. Nothing here knows of an accelerator;
`exercise.py` is this script on its way to one.
"""

import argparse

import tensorflow as tf
from mnist_data import load_data

arguments = argparse.ArgumentParser()
arguments.add_argument("--epochs", type=int, default=3)
args = arguments.parse_args()
batch_size = 64
tf.keras.utils.set_random_seed(30)

(x_train, y_train), (x_test, y_test) = load_data()
x_train, x_test = (x[..., None].astype("float32") / 255 for x in (x_train, x_test))

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
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=batch_size, epochs=args.epochs, verbose=2)
model.save("mnist.keras")

_, accuracy = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
print(f"accuracy: {100 * accuracy:.2f} % of {len(x_test)} images")
