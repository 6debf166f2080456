"""Section III with an epoch in one call: `steps_per_execution`."""

import numpy as np
import tensorflow.keras as keras
from tensorflow.python import ipu

num_classes = 10
input_shape = (28, 28, 1)
batch_size = 64


def load_data():
    train, test = keras.datasets.mnist.load_data()
    return [
        (np.expand_dims(x.astype("float32") / 255, -1), keras.utils.to_categorical(y, num_classes))
        for x, y in (train, test)
    ]


def model_fn():
    input_layer = keras.Input(shape=input_shape)
    x = keras.layers.Conv2D(32, kernel_size=(3, 3), activation="relu")(input_layer)
    x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
    x = keras.layers.Conv2D(64, kernel_size=(3, 3), activation="relu")(x)
    x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.5)(x)
    x = keras.layers.Dense(num_classes, activation="softmax")(x)
    return input_layer, x


def make_divisible(number, divisor):
    return number - number % divisor


(x_train, y_train), (x_test, y_test) = load_data()
train_data_len = x_train.shape[0]
train_steps_per_execution = train_data_len // batch_size
train_data_len = make_divisible(train_data_len, batch_size)
x_train, y_train = x_train[:train_data_len], y_train[:train_data_len]
test_data_len = x_test.shape[0]
test_steps_per_execution = test_data_len // batch_size
test_data_len = make_divisible(test_data_len, batch_size)
x_test, y_test = x_test[:test_data_len], y_test[:test_data_len]

ipu_config = ipu.config.IPUConfig()
ipu_config.auto_select_ipus = 1
ipu_config.configure_ipu_system()

strategy = ipu.ipu_strategy.IPUStrategy()

with strategy.scope():
    model = keras.Model(*model_fn())
    model.compile(
        "sgd",
        "categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=train_steps_per_execution,
    )
    model.summary()

    print("\nTraining")
    model.fit(x_train, y_train, epochs=1, batch_size=batch_size)

    model.compile(
        "sgd",
        "categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=test_steps_per_execution,
    )
    print("\nEvaluation")
    model.evaluate(x_test, y_test, batch_size=batch_size)

print("Program ran successfully")
