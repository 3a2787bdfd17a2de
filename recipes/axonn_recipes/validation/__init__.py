"""Paper 003's validation: a GPT and a U-Net with every axis in use and everything on learn as the serial models do."""
