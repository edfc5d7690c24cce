"""Trained heads: the modules, and the files they are published in."""

from slipstream.heads.base import Head, Prediction
from slipstream.heads.dflash import DFlash
from slipstream.heads.eagle import Eagle
from slipstream.heads.eagle3 import Eagle3
from slipstream.heads.falcon import Falcon
from slipstream.heads.layouts import export_head, load_head, save_head
from slipstream.heads.medusa import Medusa
from slipstream.heads.mlp import MLPSpeculator
from slipstream.heads.redrafter import ReDrafter
from slipstream.heads.spire import Spire

HEADS: dict[str, type[Head]] = {
    head.kind: head for head in (Medusa, ReDrafter, MLPSpeculator, Eagle, Eagle3, Falcon, DFlash, Spire)
}

__all__ = ["HEADS", "Head", "Prediction", "export_head", "load_head", "save_head"]
