"""replace_attention: swap the softmax attention of an existing torch model for Flow-Attention."""

from __future__ import annotations

from torch import nn

from ..ops import FlowVariant
from .attention import independent_sinks
from .multihead import FlowMultiheadAttention

_DEFAULT = FlowVariant()


def replace_attention(model: nn.Module, *, variant: FlowVariant | str = _DEFAULT) -> nn.Module:
    """Swap every `torch.nn.MultiheadAttention` of a model in place for `FlowMultiheadAttention`, weights kept.

    The parameters stay the same objects, so optimisers, tied weights and state dicts keep working. Hooks on the old
    modules are not carried over. In an nn.TransformerDecoderLayer the cross-attention gets
    `independent_sinks(variant)`, so that no token sees later tokens, and nn.TransformerEncoder stops making nested
    tensors. If another module attends to a memory that may be as long as its queries, set `cross_attention = True`
    on its replacement.

    Args:
        model: any module. Weights are kept. Fine-tune afterwards: this is a different function from softmax attention.
        variant: a FlowVariant or the name of one.

    Returns: the model; if the model itself is an nn.MultiheadAttention, its replacement.

    >>> model = replace_attention(nn.TransformerEncoderLayer(32, 4))
    >>> type(model.self_attn).__name__
    'FlowMultiheadAttention'
    """
    attentions = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, FlowMultiheadAttention)
    }
    if not attentions:
        raise ValueError(
            f"found no torch.nn.MultiheadAttention in {type(model).__name__}; there is nothing to replace."
        )
    for name, module in attentions.items():
        # a subclass (torch.nn.utils.parametrize makes one too) may hold other weights or compute something else
        if type(module) is not nn.MultiheadAttention:
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, a subclass of torch.nn.MultiheadAttention; only "
                "the class itself can be replaced. Call replace_attention on the other parts of the model."
            )
    decoder_layers = [each for each in model.modules() if isinstance(each, nn.TransformerDecoderLayer)]
    cross_attentions = {id(layer.multihead_attn) for layer in decoder_layers}
    replacements = {
        id(module): _replacement(module, variant, is_cross=id(module) in cross_attentions)
        for module in attentions.values()
    }
    for name, module in attentions.items():
        if not name:
            return replacements[id(module)]
        model.set_submodule(name, replacements[id(module)])
    for each in model.modules():
        if isinstance(each, nn.TransformerEncoder):
            each.use_nested_tensor = False
    return model


def _replacement(old: nn.MultiheadAttention, variant: FlowVariant | str, is_cross: bool) -> FlowMultiheadAttention:
    # on the meta device: all parameters are replaced by those of the old module below
    new = FlowMultiheadAttention(
        old.embed_dim,
        old.num_heads,
        dropout=old.dropout,
        bias=old.in_proj_bias is not None,
        add_bias_kv=old.bias_k is not None,
        add_zero_attn=old.add_zero_attn,
        kdim=old.kdim,
        vdim=old.vdim,
        batch_first=old.batch_first,
        device="meta",
        variant=independent_sinks(variant) if is_cross else variant,
        cross_attention=is_cross or None,
    )
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    new.out_proj = old.out_proj
    new.training = old.training
    return new
