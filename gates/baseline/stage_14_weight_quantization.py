"""The baseline of stage 14: the decoder as it is loaded, its layers in 32 bits (16 on a GPU).

There is nothing to build: the scenarios run the model that they were given.
"""
