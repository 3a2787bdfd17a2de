"""VGG-19 and a wide residual network, dense and pruned: the convolutional networks of 000, Table 4.1."""
