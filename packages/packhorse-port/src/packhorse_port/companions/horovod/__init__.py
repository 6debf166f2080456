"""`horovod`: its module `horovod.torch`, over torch.distributed."""
