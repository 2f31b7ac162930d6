"""Which of the target's layers the drafter reads."""

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.checkpoints.drafter import drafter_shapes
from dflash_trt.checkpoints.summary import OTHER_DRAFTER, Pair
from dflash_trt.checkpoints.zlab import default_taps

CORRECT = "Check target_layer_ids in the drafter's config.json against the published one"


@check("error")
def taps_in_range(pair: Pair) -> Found:
    """A tap reads a layer that the target has."""
    layers, taps = pair.target.number("num_hidden_layers"), pair.drafter.taps
    wrong = tuple(tap for tap in taps if not 0 <= tap < layers)
    return Found(
        not wrong,
        f"the drafter taps layer {_list(wrong or taps)} (target_layer_ids), this target's layers "
        f"are 0 to {layers - 1}",
        OTHER_DRAFTER,
    )


@check("error")
def last_layer_not_tapped(pair: Pair) -> Found:
    """transformers hands out its normed state, other servers the plain one: they draft apart."""
    last = pair.target.number("num_hidden_layers") - 1
    tapped = last in pair.drafter.taps
    return Found(
        not tapped,
        f"the drafter {'taps' if tapped else 'does not tap'} the target's last layer {last}, whose "
        "output stands behind the final norm in some servers",
        f"{CORRECT}; ids that count from 1 are one too high",
    )


@check("warning")
def taps_stated(pair: Pair) -> Found:
    """Without target_layer_ids z-lab's default is a guess: several drafters do not follow it."""
    values = pair.drafter.values
    stated = any(values.get(name) for name in ("target_layer_ids", "aux_hidden_state_layer_ids"))
    return Found(
        stated,
        f"the drafter's config.json states {'its' if stated else 'no'} target_layer_ids; "
        f"{_list(pair.drafter.taps)} are used",
        "Write the target_layer_ids that it was trained with into its config.json",
    )


@check("warning")
def taps_off_by_one(pair: Pair) -> Found:
    """speculators and llama.cpp count from 1, z-lab from 0; neighbours draft, but badly.

    Seen where every tap lies beside z-lab's default for this many taps.
    """
    taps = pair.drafter.taps
    usual = default_taps(pair.target.number("num_hidden_layers"), len(taps))
    beside = [off for off in (1, -1) if taps == tuple(tap + off for tap in usual)]
    return Found(
        len(taps) < 2 or not beside,
        f"the drafter's taps are {_list(taps)}"
        + (f", each {beside[0]:+d} from the usual {_list(usual)}" if beside else ""),
        f"{CORRECT}: z-lab's ids count from 0, those of speculators and llama.cpp from 1",
    )


@check("warning")
def taps_in_order(pair: Pair) -> Found:
    """Features are joined in the list's order; a sorted copy of the list reads them scrambled."""
    taps = pair.drafter.taps
    return Found(
        tuple(sorted(set(taps))) == taps,
        f"the drafter's taps are {_list(taps)}, in this order",
        CORRECT,
    )


@check("error")
def fc_width(pair: Pair) -> Found:
    """fc's width says for how many taps, and for which hidden size, the drafter was trained."""
    spec, weights = pair.drafter.loaded.spec, pair.drafter.loaded.weights
    expected, found = drafter_shapes(spec)["fc.weight"], weights.shape("fc.weight")
    return Found(
        found == expected,
        f"the drafter's fc.weight is {list(found)}, {len(pair.drafter.taps)} taps of hidden size "
        f"{spec.hidden_size} need {list(expected)}",
        "Use the config.json and the weights of one drafter",
    )


def _list(taps: tuple[int, ...]) -> str:
    return ", ".join(map(str, taps))
