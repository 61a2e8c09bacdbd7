"""The derivative through the attention weights, kept or stopped.

    attention(x) = softmax(Q K^T) V,     Q, K, V projections of x

`softmax_gradient=stopped` takes softmax(Q K^T) for a constant: the loss reaches V alone. So queries and keys get no
gradient, and below an attention module it arrives through the values and the residual stream only. Outputs do not
change by one bit. A linearized model still moves by the true derivative J delta; what is stopped is learning, which is
backward.
"""

from typing import Any

from fairseq.modules import MultiheadAttention
from torch import nn
from torch.utils.hooks import RemovableHandle

from fairseq_icl.errors import UserError
from fairseq_icl.observing.probe import attention_modules, detached, is_plain


def stop_softmax_gradient(decoder: Any) -> list[RemovableHandle]:
    """Hooks on a decoder of which queries and keys are frozen; they act in passes that keep a graph."""
    hooks: list[RemovableHandle] = []

    def detach_query_and_key(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_name = {name: detached(kwargs[name]) for name in ("query", "key") if name in kwargs}
        return (*map(detached, args[:2]), *args[2:]), kwargs | by_name

    for module in attention_modules(decoder):
        if is_plain(module):
            # fairseq's fused attention never calls q_proj and k_proj, but projects the three inputs it is given.
            hooks.append(module.register_forward_pre_hook(detach_query_and_key, with_kwargs=True))
        elif isinstance(module, MultiheadAttention):
            raise UserError(
                "softmax_gradient=stopped: not implemented for this model's attention (extra keys, or xformers); "
                "use softmax_gradient=kept"
            )
        else:
            parts = (module.q_proj, module.k_proj)
            hooks += [part.register_forward_hook(lambda _, __, output: detached(output)) for part in parts]
    return hooks
