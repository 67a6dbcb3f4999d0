"""The launcher's use of torch's elastic agent. Its modules import torch."""
