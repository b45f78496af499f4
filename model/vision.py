"""The image tower: a ViT over patches, an aligner over 3x3 patches, and the span's role rows.

Patches attend to all patches of their own picture. The aligner pads the grid with zeros to whole
cells and maps each cell to one row of the text model's width. Attention over the finished span is
plain causal attention of the trunk; nothing here knows positions in a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from headrace.core.images import ImageGeometry
from headrace.kernels import kernels_for
from headrace.model.config import ModelConfig, VisionConfig
from headrace.model.errors import BatchError
from headrace.model.numerics import Numerics, Precision
from headrace.model.vision_weights import (
    BlockParams,
    Linear,
    random_vision_id,
    random_vision_tensors,
    vision_params,
    vision_section,
)

ROW_GRID = 2.0**-16
_DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}


def image_geometry(config: ModelConfig) -> ImageGeometry:
    """The numbers that decide how many rows a picture takes, for rooms without torch.

    Raises `ConfigError` if the config has no image tower or an impossible one."""
    v = vision_section(config)
    return ImageGeometry(
        patch_px=v.patch_size,
        downsample=v.downsample,
        max_tokens=v.max_image_tokens,
        min_pixels=v.min_pixels,
        max_wh_ratio=v.max_wh_ratio,
    )


class VisionTower:
    """ViT and aligner on one device in one numerics class; its weights never change."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        numerics: Numerics,
        device: str | torch.device = "cpu",
        *,
        weights_id: str,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """`tensors` are checkpoint names -> values of any float dtype. Raises `ConfigError`."""
        self.config: VisionConfig = vision_section(config)
        self.geometry = image_geometry(config)
        self.hidden_size = config.hidden_size
        self.numerics = numerics
        self.weights_id = weights_id
        self.device = torch.device(device)
        self.precision = Precision.of(numerics, compute_dtype)
        self.kernels = kernels_for(self.device)
        self.params = vision_params(config, tensors, self.precision, self.device)
        levels = torch.arange(256, dtype=torch.float64)
        self._levels = ((levels / 255 - 0.5) / 0.5).to(self.device, self.precision.compute)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        seed: int,
        numerics: Numerics,
        device: str | torch.device = "cpu",
        *,
        compute_dtype: torch.dtype | None = None,
    ) -> VisionTower:
        """Seeded random weights, equal on every platform."""
        return cls(
            config,
            random_vision_tensors(config, seed),
            numerics,
            device,
            weights_id=random_vision_id(config, seed),
            compute_dtype=compute_dtype,
        )

    @property
    def rows_dtype(self) -> torch.dtype:
        """float64 where the tower computes in float64, else float32."""
        return self.precision.accumulate

    @property
    def identity(self) -> str:
        """Weights and numerics class: what a picture's rows depend on besides its pixels."""
        dtype = _DTYPE_NAMES[self.precision.compute]
        return f"{self.weights_id}/{self.numerics.value}-{dtype}"

    def encode(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        """The rows of one picture's span: `encode_batch([pixels])[0]`."""
        return self.encode_batch([pixels])[0]

    def encode_batch(self, images: Sequence[NDArray[np.uint8]]) -> list[torch.Tensor]:
        """For each picture the rows [rows * (cols + 1) + 2, D] of its span, role rows included.

        `images` are uint8 [H, W, 3], RGB, already resized and padded: H and W whole patches, at
        most `geometry.max_tokens` rows. Memory grows with the patches of all pictures together;
        the caller bounds them. Rows are `rows_dtype`, on the tower's device, and own their memory.

        In `invariant` numerics the bits do not depend on what shares the call: float64 sums differ
        by about 1e-15, and rows are rounded to multiples of 2^-16. Raises `BatchError` before
        anything is computed."""
        grids = [self._grid(image) for image in images]
        if not grids:
            return []
        with torch.inference_mode():
            x = self._linear(torch.cat([self._patches(i) for i in images]), self.params.patch)
            counts = [rows * cols for rows, cols in grids]
            cos, sin = self._phases(grids)
            for block in self.params.blocks:
                x = self._block(x, block, counts, cos, sin)
            x = self._norm(x, self.params.norm)
            cells = [
                self._unfold(part, *grid) for part, grid in zip(x.split(counts), grids, strict=True)
            ]
            hidden = F.gelu(self._linear(torch.cat(cells), self.params.aligner1))
            rows = self._linear(hidden, self.params.aligner2).split([len(c) for c in cells])
            return [self._span(part, *grid) for part, grid in zip(rows, grids, strict=True)]

    def _grid(self, image: NDArray[np.uint8]) -> tuple[int, int]:
        """(patch rows, patch columns)"""
        patch = self.config.patch_size
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise BatchError(
                f"picture: found {image.dtype} of shape {image.shape}, wanted uint8 [H, W, 3]"
            )
        height, width, _ = image.shape
        if not height or not width or height % patch or width % patch:
            raise BatchError(
                f"picture: found {height} x {width} pixels, wanted multiples of {patch}"
            )
        grid = height // patch, width // patch
        rows, cols = self._cells(*grid)
        if (n := rows * (cols + 1) + 2) > self.geometry.max_tokens:
            raise BatchError(f"picture: found {n} rows, wanted at most {self.geometry.max_tokens}")
        return grid

    def _cells(self, patch_rows: int, patch_cols: int) -> tuple[int, int]:
        step = self.config.downsample
        return -(-patch_rows // step), -(-patch_cols // step)

    def _patches(self, image: NDArray[np.uint8]) -> torch.Tensor:
        """[patches, 3 * patch * patch], row-major patches, channel-major values in [-1, 1]."""
        p = self.config.patch_size
        rows, cols = self._grid(image)
        split = image.reshape(rows, p, cols, p, 3).transpose(0, 2, 4, 1, 3)
        flat = np.ascontiguousarray(split).reshape(rows * cols, 3 * p * p)
        return self._levels[torch.from_numpy(flat).to(self.device, torch.int64)]

    def _phases(self, grids: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [patches of all pictures, 1, head_dim / 2]: row angles, then column angles."""
        v = self.config
        half = v.hidden_size // v.num_attention_heads // 2
        steps = torch.arange(0, half, 2, dtype=self.precision.accumulate, device=self.device)
        freqs = v.rope_theta ** (-steps / half)
        places = [
            torch.cartesian_prod(
                torch.arange(rows, device=self.device), torch.arange(cols, device=self.device)
            )
            for rows, cols in grids
        ]
        angles = (torch.cat(places).unsqueeze(-1) * freqs).flatten(1).unsqueeze(1)
        return angles.cos(), angles.sin()

    def _block(
        self,
        x: torch.Tensor,
        block: BlockParams,
        counts: list[int],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        heads = self.config.num_attention_heads
        qkv = self._linear(self._norm(x, block.norm1), block.wqkv)
        q, k, v = qkv.view(len(x), 3, heads, -1).unbind(1)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        parts = [
            # [heads, patches, head_dim]; full attention inside one picture, scale head_dim^-0.5
            F.scaled_dot_product_attention(*(t.transpose(0, 1).unsqueeze(0) for t in one))[0]
            for one in zip(q.split(counts), k.split(counts), v.split(counts), strict=True)
        ]
        attended = torch.cat(parts, dim=1).transpose(0, 1).flatten(1)
        x = x + self._linear(attended, block.wo)
        gate, up = self._linear(self._norm(x, block.norm2), block.w1).chunk(2, dim=-1)
        return x + self._linear(F.silu(gate) * up, block.w2)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate-half: channel i pairs with channel i + head_dim / 2."""
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, dim=-1).to(x.dtype)

    def _unfold(self, x: torch.Tensor, patch_rows: int, patch_cols: int) -> torch.Tensor:
        """[cells, dim * step * step], channel-major; missing patches of edge cells are zero."""
        step = self.config.downsample
        rows, cols = self._cells(patch_rows, patch_cols)
        padded = x.new_zeros(rows * step, cols * step, x.shape[-1])
        padded[:patch_rows, :patch_cols] = x.view(patch_rows, patch_cols, -1)
        cells = padded.view(rows, step, cols, step, -1).permute(0, 2, 4, 1, 3)
        return cells.reshape(rows * cols, -1)

    def _span(self, cells: torch.Tensor, patch_rows: int, patch_cols: int) -> torch.Tensor:
        rows, cols = self._cells(patch_rows, patch_cols)
        p, d = self.params, self.hidden_size
        lines = torch.cat((cells.view(rows, cols, d), p.newline.expand(rows, 1, d)), dim=1)
        span = torch.cat((p.start[None], lines.reshape(-1, d), p.end[None])).to(self.rows_dtype)
        if self.numerics is Numerics.INVARIANT:
            span = torch.round(span / ROW_GRID) * ROW_GRID + 0.0  # no negative zero
        return span

    def _linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x, weight, self.config.rms_norm_eps)
