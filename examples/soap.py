"""SOAP (eigenvalue-corrected Shampoo) of pytorch-optimizer, with a start step as in the paper's recipes."""

import torch
from pytorch_optimizer import SOAP


class DelayedSOAP(SOAP):
    """Adam until `start_precondition_step`, while the preconditioner gathers statistics; SOAP from there on."""

    def __init__(self, *args, start_precondition_step: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            group["start_precondition_step"] = start_precondition_step

    def project(self, grad: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        group = self.param_groups[0]
        if group["step"] <= group["start_precondition_step"]:
            return grad  # the eigenbasis of no statistics at all is the one that we are in
        return super().project(grad, *args, **kwargs)
