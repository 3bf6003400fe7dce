"""Slow, obvious forms of the layers, written from the papers' formulas: what the fast forms must equal."""

from itertools import product

import torch
import torch.nn.functional as F


def position_softmax(queries, keys, score):
    """softmax over keys of score(dy, dx), one query at a time. queries, keys: lists of (row, column)."""
    maps = []
    for qy, qx in queries:
        scores = torch.stack([score(ky - qy, kx - qx) for ky, kx in keys])  # (Nk, nh)
        maps.append(torch.softmax(scores, dim=0))
    return torch.stack(maps).permute(2, 0, 1)  # (nh, Nq, Nk)


def gpsa(layer, x, grid_size):
    """ConViT eq. 7 on the dense map, head by head; a prefix token has no place and is no place."""
    H, W = grid_size
    cells = []
    for r in range(H):
        for c in range(W):
            cells.append((r, c))
    v_pos = layer.position

    def score(dy, dx):
        return v_pos[:, 0] * dx + v_pos[:, 1] * dy + v_pos[:, 2] * (dx**2 + dy**2)

    position = position_softmax(cells, cells, score)
    q, k = layer.qk(x).chunk(2, dim=-1)
    v = layer.v(x)
    hd = x.shape[-1] // layer.num_heads
    prefix = layer.prefix_tokens
    heads = []
    for h in range(layer.num_heads):
        part = slice(h * hd, (h + 1) * hd)
        content = torch.softmax(q[..., part] @ k[..., part].transpose(1, 2) / hd**0.5, dim=-1)
        s = torch.sigmoid(layer.gate[h])
        placed = F.pad(position[h], (prefix, 0))
        placed = (1 - s) * content[:, prefix:] + s * placed
        attention = torch.cat([content[:, :prefix], placed], dim=1)
        attention = attention / attention.sum(-1, keepdim=True)
        heads.append(attention @ v[..., part])
    return layer.proj(torch.cat(heads, dim=-1))


def psa(layer, x, grid_size):
    """ConViT eq. 4, one head, one query and one key after the other."""
    H, W = grid_size
    cells = [(r, c) for r in range(H) for c in range(W)]
    q, k = layer.qk(x).chunk(2, dim=-1)
    v = layer.v(x)
    hd = x.shape[-1] // layer.num_heads
    heads = []
    for h in range(layer.num_heads):
        part = slice(h * hd, (h + 1) * hd)
        v_pos = layer.position[h]
        rows = []
        for i, (qy, qx) in enumerate(cells):
            scores = []
            for j, (ky, kx) in enumerate(cells):
                dy = ky - qy
                dx = kx - qx
                r = torch.tensor([dx, dy, dx**2 + dy**2], dtype=x.dtype)
                scores.append((q[:, i, part] * k[:, j, part]).sum(-1) / hd**0.5 + v_pos @ r)
            rows.append(torch.softmax(torch.stack(scores, dim=-1), dim=-1))
        heads.append(torch.stack(rows, dim=1) @ v[..., part])
    return layer.proj(torch.cat(heads, dim=-1))


def tap_positions(layer, H, W):
    """Keys and queries of an H x W map, padding included, and T-CNN eq. 4. -> lists of (row, column), (nh, Nq, Nk)"""
    k, (sh, sw) = layer.kernel_size, layer.stride
    keys = []
    for r in range(H):
        for c in range(W):
            keys.append((r, c))
    queries = []
    for r in range(0, H - k + 1, sh):
        for c in range(0, W - k + 1, sw):
            queries.append((r + k // 2, c + k // 2))
    alpha = torch.log(1 + torch.exp(5 * layer.raw_locality)) / 5

    def score(dy, dx):
        delta_1, delta_2 = layer.centre.unbind(1)
        return -alpha * (dy**2 + dx**2 - 2 * delta_1 * dy - 2 * delta_2 * dx)

    return keys, queries, position_softmax(queries, keys, score)


def gpsa2d_attention(layer, x):
    """T-CNN eq. 7 on an explicitly padded map, head by head. -> (B, nh, Nq, Nk)"""
    ph, pw = layer.padding
    padded = F.pad(x, (pw, pw, ph, ph))
    keys, queries, position = tap_positions(layer, *padded.shape[-2:])
    tokens = padded.flatten(2).transpose(1, 2)
    standing = torch.stack([padded[:, :, r, c] for r, c in queries], dim=1)
    nh = layer.num_heads
    width = -(-layer.in_channels // nh)
    maps = []
    for h in range(nh):
        rows = slice(h, None, nh)
        q = standing @ layer.query.weight[rows].T
        key = tokens @ layer.key.weight[rows].T
        content = content_of(layer, q / width**0.5, key, queries, keys)
        s = torch.sigmoid(layer.gate[h])
        maps.append((1 - s) * content + s * position[h])
    return torch.stack(maps, dim=1)


def content_of(layer, q, key, queries, keys):
    """Softmax over all keys, or over those of a window. -> (B, Nq, Nk)"""
    if hasattr(layer, "window"):
        (wh, ww) = layer.window
        near = []
        for qr, qc in queries:
            row = []
            for r, c in keys:
                row.append(abs(r - qr) <= wh // 2 and abs(c - qc) <= ww // 2)
            near.append(row)
        return torch.softmax(
            (q @ key.transpose(1, 2)).masked_fill(~torch.tensor(near), -torch.inf), dim=-1
        )
    return torch.softmax(q @ key.transpose(1, 2), dim=-1)


def taps_of(layer):
    """The filters of all heads, with zeros between groups of channels. -> (C_out, C, nh)"""
    taps = layer.weight.flatten(2)
    groups = layer.groups
    whole = torch.zeros(layer.out_channels, layer.in_channels, taps.shape[2], dtype=taps.dtype)
    for g in range(groups):
        out = layer.out_channels // groups
        within = layer.in_channels // groups
        rows = slice(g * out, (g + 1) * out)
        columns = slice(g * within, (g + 1) * within)
        whole[rows, columns] = taps[rows]
    return whole


def gpsa2d(layer, x):
    """T-CNN eq. 2: the sum over heads of A_h X W_val W_out^h."""
    ph, pw = layer.padding
    values = F.pad(x, (pw, pw, ph, ph)).flatten(2).transpose(1, 2)
    values = values if layer.value is None else values @ layer.value.weight.T
    taps = taps_of(layer)
    out = 0
    for h, a in enumerate(gpsa2d_attention(layer, x).unbind(1)):
        out = out + a @ values @ taps[:, :, h].T
    if layer.bias is not None:
        out = out + layer.bias
    return out.transpose(1, 2).unflatten(-1, layer.query_grid(*x.shape[-2:]))


def pyramid(layer, x):
    """TDRL eq. 6 and 7, branch by branch: every token through every layer. x (*, C), or (B, C, H, W) of convolutions"""
    tokens = x if layer.branches[0][0].weight.ndim == 4 else x.flatten(0, -2)
    total = 0
    for chain in layer.chains:
        y = tokens
        for part in chain:
            y = part(y)
        total = total + y
    if layer.rectify == "rescale":
        total = total / layer.rescale_by**0.5
    if layer.norm is not None:
        total = layer.norm(total)
    return total if tokens is x else total.view(*x.shape[:-1], -1)


def refined_maps(layer, x, real=None):
    """Refiner Fig. 3: softmax maps, then three convolutions, as the paper draws them. -> (B, maps, N, N)"""
    q, k, _ = layer.qkv(x).chunk(3, dim=-1)
    hd = x.shape[-1] // layer.num_heads
    maps = []
    for h in range(layer.num_heads):
        part = slice(h * hd, (h + 1) * hd)
        logits = layer.q_norm(q[..., part]) @ layer.k_norm(k[..., part]).transpose(1, 2) / hd**0.5
        if real is not None:
            logits = logits.masked_fill(~real[:, None], -torch.inf)
        maps.append(torch.softmax(logits, dim=-1))
    maps = layer.attn_drop(torch.stack(maps, dim=1))
    refine = layer.refine
    if real is not None:
        maps = maps * real[:, None, :, None]
    if hasattr(refine, "expand"):
        maps = F.conv2d(maps, refine.expand[:, :, None, None])
    if hasattr(layer, "grid_size"):
        maps = convolve_pictures(maps, refine.local(), layer.grid_size, layer.prefix_tokens)
    else:
        maps = convolve_maps(maps, refine.local())
    if hasattr(refine, "reduce"):
        maps = F.conv2d(maps, refine.reduce[:, :, None, None])
    return maps if real is None else maps * real[:, None, None, :]


def convolve_maps(maps, taps):
    """Refiner section 3.3 entry by entry: A*_ij = sum_ab w_ab A_(i - k/2 + a)(j - k/2 + b). taps (M, k, k)"""
    N = maps.shape[-1]
    k = taps.shape[-1]
    rows = []
    for i, j in product(range(N), range(N)):
        total = torch.zeros_like(maps[:, :, 0, 0])
        for a, b in product(range(k), range(k)):
            r = i - k // 2 + a
            c = j - k // 2 + b
            if 0 <= r < N and 0 <= c < N:
                total = total + taps[:, a, b] * maps[:, :, r, c]
        rows.append(total)
    return torch.stack(rows, dim=-1).unflatten(-1, (N, N))


def convolve_pictures(maps, taps, grid_size, prefix):
    """Refiner Table 4 "Spatial": each row of the map is a picture of the keys, and that is convolved."""
    H, W = grid_size
    k = taps.shape[-1]
    out = []
    for j in range(maps.shape[-1]):
        if j < prefix:
            out.append(taps[:, k // 2, k // 2, None] * maps[..., j])
            continue
        y, x = divmod(j - prefix, W)
        total = torch.zeros_like(maps[..., 0])
        for a, b in product(range(k), range(k)):
            r = y - k // 2 + a
            c = x - k // 2 + b
            if 0 <= r < H and 0 <= c < W:
                total = total + taps[:, a, b, None] * maps[..., prefix + r * W + c]
        out.append(total)
    return torch.stack(out, dim=-1)


def refined_attention(layer, x, real=None):
    """Refined maps times values, head by head; without reduction map m weighs the values of head m // ratio."""
    maps = refined_maps(layer, x, real)
    v = layer.qkv(x).chunk(3, dim=-1)[2].chunk(layer.num_heads, dim=-1)
    ratio = maps.shape[1] // layer.num_heads
    return layer.proj(torch.cat([m @ v[i // ratio] for i, m in enumerate(maps.unbind(1))], dim=-1))


def relative_scores(layer, H, W):
    """CoAtNet A.1, entry by entry: of query (i, j) and key (k, m) P[i - k + H - 1, j - m + W - 1]. -> (nh, N, N)"""
    table = bilinear(layer.relative_bias, 2 * H - 1, 2 * W - 1)
    cells = []
    for i in range(H):
        for j in range(W):
            cells.append((i, j))
    rows = []
    for i, j in cells:
        row = []
        for k, m in cells:
            row.append(table[:, i - k + H - 1, j - m + W - 1])
        rows.append(row)
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def bilinear(table, height, width):
    """Bilinear interpolation between the middles of cells, entry by entry. table (nh, h, w) -> (nh, height, width)"""

    def neighbours(i, size, old):
        at = min(max((i + 0.5) * old / size - 0.5, 0.0), old - 1.0)
        low = int(at)
        return low, min(low + 1, old - 1), at - low

    out = []
    for i in range(height):
        a, b, s = neighbours(i, height, table.shape[1])
        for j in range(width):
            c, d, t = neighbours(j, width, table.shape[2])
            top = (1 - t) * table[:, a, c] + t * table[:, a, d]
            bottom = (1 - t) * table[:, b, c] + t * table[:, b, d]
            out.append((1 - s) * top + s * bottom)
    return torch.stack(out, dim=-1).unflatten(-1, (height, width))


def relative_attention(layer, x, post=False):
    """CoAtNet eq. 3, head by head: w added before the softmax, or after it. x (B, H, W, C)"""
    H, W = x.shape[1:3]
    w = relative_scores(layer, H, W)
    hd = layer.head_dim
    q, k, v = (t.split(hd, dim=-1) for t in layer.qkv(x.flatten(1, 2)).chunk(3, dim=-1))
    heads = []
    for h in range(layer.num_heads):
        scores = q[h] @ k[h].transpose(1, 2) / hd**0.5
        a = torch.softmax(scores, dim=-1) + w[h] if post else torch.softmax(scores + w[h], dim=-1)
        heads.append(a @ v[h])
    return layer.proj(torch.cat(heads, dim=-1)).unflatten(1, (H, W))


def mbconv(block, x, stride, stride_on):
    """CoAtNet eq. 5 from the block's tensors, in eval mode: every norm and every convolution on its own."""

    def norm(layer, y):
        stats = [
            t[:, None, None]
            for t in (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        ]
        return (y - stats[0]) / torch.sqrt(stats[1] + layer.eps) * stats[2] + stats[3]

    def gelu(y):
        return y * 0.5 * (1 + torch.erf(y / 2**0.5))

    first, second = (stride, 1) if stride_on == "expand" else (1, stride)
    y = F.conv2d(norm(block.norm, x), block.expand.weight, stride=first)
    y = gelu(norm(block.norm1, y))
    y = F.conv2d(y, block.depthwise.weight, stride=second, padding=1, groups=y.shape[1])
    y = gelu(norm(block.norm2, y))
    se = block.se
    squeezed = gelu(y.mean((2, 3)) @ se.fc1.weight.flatten(1).T + se.fc1.bias)
    y = y * torch.sigmoid(squeezed @ se.fc2.weight.flatten(1).T + se.fc2.bias)[:, :, None, None]
    y = F.conv2d(y, block.project.weight, block.project.bias)
    if stride == 2:
        H, W = x.shape[-2:]
        cells = []
        for i in range(0, H, 2):
            row = []
            for j in range(0, W, 2):
                row.append(x[..., i : i + 2, j : j + 2].amax((2, 3)))
            cells.append(row)
        x = torch.stack([torch.stack(row, dim=-1) for row in cells], dim=-2)
    if x.shape[1] != y.shape[1]:
        x = F.conv2d(x, block.shortcut[1].weight, block.shortcut[1].bias)
    return x + y


def positional_conv(layer, x):
    """T-CNN eq. 4 with closed gates: the dense position map of every head, then its filter."""
    ph, pw = layer.padding
    padded = F.pad(x, (pw, pw, ph, ph))
    _, _, maps = tap_positions(layer, *padded.shape[-2:])
    taps = taps_of(layer)
    tokens = padded.flatten(2).transpose(1, 2)
    out = sum(maps[h] @ tokens @ taps[:, :, h].T for h in range(len(maps))) + layer.bias
    return out.transpose(1, 2).unflatten(-1, layer.query_grid(*x.shape[-2:]))


def decomposed_attention(layer, x):
    """ViTDet's attention: pad with zeros, cut windows, one head, one query and one key after the other."""
    B, H, W, _ = x.shape
    h, w = layer.window or (H, W)
    padded = F.pad(x, (0, 0, 0, -W % w, 0, -H % h))
    out = torch.zeros(B, padded.shape[1], padded.shape[2], layer.attn_dim, dtype=x.dtype)
    hd = layer.head_dim
    for top, left in product(range(0, padded.shape[1], h), range(0, padded.shape[2], w)):
        cells = list(product(range(h), range(w)))
        tokens = padded[:, top : top + h, left : left + w].reshape(B, h * w, -1)
        q, k, v = layer.qkv(tokens).chunk(3, -1)
        for head in range(layer.num_heads):
            part = slice(head * hd, (head + 1) * hd)
            for number, (i, j) in enumerate(cells):
                query = q[:, number, part]
                scores = []
                for other, (a, b) in enumerate(cells):
                    content = (query * k[:, other, part]).sum(-1) / hd**0.5
                    down = query @ layer.rel_pos_h[i - a + h - 1]
                    across = query @ layer.rel_pos_w[j - b + w - 1]
                    scores.append(content + down + across)
                weights = torch.stack(scores, -1).softmax(-1)  # (B, N)
                out[:, top + i, left + j, part] = torch.einsum("bn,bnc->bc", weights, v[..., part])
    return layer.proj(out[:, :H, :W])
