"""SOAP, Shampoo with Adam in its eigenbasis, as pytorch-optimizer has it, with the start step of the paper's recipes."""

from functools import reduce

import torch
from pytorch_optimizer import SOAP


class DelayedSOAP(SOAP):
    """
    Adam with decoupled weight decay for `start_precondition_step` steps (at least one), while Shampoo's statistics are
    gathered; SOAP from there on. The library calls the statistics `GG` and their eigenvectors `Q`: one matrix for each
    dimension of a parameter, or `[]` for a dimension that keeps its basis.
    """

    def __init__(self, params, *args, start_precondition_step: int = 0, **kwargs):
        self.validate_non_negative(start_precondition_step, "start_precondition_step")
        self.start_precondition_step = start_precondition_step
        super().__init__(params, *args, **kwargs)

    def init_group(self, group: dict, **kwargs) -> None:
        group.setdefault("step", 1)  # the library counts from 0 and updates nothing on its first step
        super().init_group(group, **kwargs)

    def update_pre_conditioner(self, grad: torch.Tensor, state: dict, step: int, **kwargs) -> None:
        """The end of step `step`, counted from 1."""
        if state["Q"] is None:  # called from `init_group`: this gradient comes again at the end of the step
            state["Q"] = [[] for _ in state["GG"]]  # Adam
            return
        started = any(len(basis) for basis in state["Q"])
        # Told that it is step 0, the library gathers statistics and leaves `Q` and the order of `exp_avg_sq` alone.
        super().update_pre_conditioner(grad, state, step=step if started else 0, **kwargs)
        if not started and step >= self.start_precondition_step and any(len(matrix) for matrix in state["GG"]):
            self.turn(state, step)

    def turn(self, state: dict, step: int) -> None:
        """
        Choose the eigenbasis and estimate the second moments in it, in the scale of `exp_avg_sq`.

        Shampoo's estimate is the product of the spectra. It is too small, hence the next update too large, where what is
        constant in the gradient outweighs its noise; but no second moment is below the square of the mean.
        """
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        state["Q"] = self.get_orthogonal_matrix(state["GG"])
        spectra = [
            (basis * (matrix @ basis)).sum(dim=0) if len(basis) else square.transpose(0, dim).flatten(1).sum(dim=1)
            for dim, (matrix, basis) in enumerate(zip(state["GG"], state["Q"]))
        ]
        tiny = torch.finfo(square.dtype).tiny  # where no gradient has come yet, all are 0
        shares = [spectrum.clamp(min=0) / spectrum.sum().clamp(min=tiny) for spectrum in spectra]
        estimate = reduce(lambda product, share: product[..., None] * share, shares) * square.sum()
        bias1, bias2 = (self.debias(beta, step) for beta in self.defaults["betas"])
        state["exp_avg_sq"] = torch.maximum(estimate, self.project(mean, state).square() * (bias2 / bias1**2))
