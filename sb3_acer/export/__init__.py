"""Agents in the ONNX format, which other programs and languages run without torch."""

from sb3_acer.export.onnx import export_onnx

__all__ = ["export_onnx"]
