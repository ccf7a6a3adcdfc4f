"""Records videos of trained agents: plays episodes, renders frames and writes them side by side."""

import base64
import contextlib
import io
import itertools
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs import features_and_mask
from envs.rendering import Episode, frames, html, import_optional
from fdg.arguments import check_at_least
from fdg.errors import FdgError
from fdg.training.deployed import Acting
from fdg.training.writable import check_writable, writing

FORMATS = (".mp4", ".gif", ".html")
MAX_STEPS = 1_000  # default limit on the steps of an episode
_CAPTION = 18  # pixels above each picture
_WIDEST = 1_600  # maximum pixels of all pictures, concatenated
_NARROWEST = 16  # minimum pixels of one picture


def play(
    algorithm: Any,
    state: Any,
    path: Path,
    *,
    episodes: int = 1,
    greedy: bool = True,
    seed: int = 0,
    fps: int = 30,
    max_steps: int = MAX_STEPS,
) -> Path:
    """Plays a batch of episodes and writes them side by side as a video."""
    if path.suffix not in FORMATS:
        raise FdgError(f"{path}: the ending of a video is one of {', '.join(FORMATS)}")
    check_at_least(1, episodes=episodes, fps=fps, max_steps=max_steps)
    if episodes > (most := _WIDEST // _NARROWEST):
        raise FdgError(
            f"episodes={episodes}: a picture has room for {most} side by side: give at most {most}"
        )
    check_writable(path)
    if path.suffix == ".mp4":
        import_optional("imageio_ffmpeg", "an mp4")
    played = played_episodes(algorithm, state, jax.random.key(seed), episodes, greedy, max_steps)
    content: bytes
    if path.suffix == ".html":
        content = _page(algorithm.env, played, fps, greedy)
    else:
        pictures = _side_by_side(algorithm.env, played, greedy)
        content = _gif(pictures, fps) if path.suffix == ".gif" else b""
    with writing(path):
        if path.suffix == ".mp4":
            _write_mp4(path, pictures, fps)
        else:
            path.write_bytes(content)
    return path


def played_episodes(
    algorithm: Any, state: Any, key: jax.Array, episodes: int, greedy: bool, max_steps: int
) -> list[Episode]:
    """Plays each episode until its first `done`, in one XLA program; keeps all data for rendering."""
    env = algorithm.env
    limit = min(env.max_episode_steps or max_steps, max_steps)
    on_host = not hasattr(env, "single")
    if (rendered := getattr(getattr(env, "source", None), "record", None)) is not None:
        seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
        acting = Acting(algorithm, state, greedy, seed)
        return rendered(lambda x, step: acting(x, start=step == 0), episodes, limit, seed)

    @jax.jit
    def run(state, key):
        actor = algorithm.actor(state)
        reset_key, run_key = jax.random.split(key)
        env_state, observation = env.reset(jax.random.split(reset_key, episodes))

        def one_step(carry, time):
            env_state, observation, memory, begins = carry
            keys = jax.random.split(jax.random.fold_in(run_key, time), (2, episodes))
            action, memory = actor.act(memory, observation, begins, keys[0], greedy)
            after, step = env.step(keys[1], env_state, action)
            shown = () if on_host else env_state.inner
            features, _ = features_and_mask(observation)
            kept = shown, features, action, step.reward, step.done
            return (after, step.observation, memory, step.done), kept

        start = env_state, observation, actor.memory(episodes), jnp.ones(episodes, bool)
        return jax.lax.scan(one_step, start, jnp.arange(limit))[1]

    states, observations, actions, rewards, dones = jax.device_get(run(state, key))
    played = []
    for i in range(episodes):
        ends = np.flatnonzero(dones[:, i])
        length = int(ends[0]) + 1 if len(ends) else limit
        reward = rewards[:length, i]
        played.append(
            Episode(
                [jax.tree.map(lambda x, t=t, i=i: x[t, i], states) for t in range(length)]
                if not on_host
                else (),
                jax.tree.map(lambda x, n=length, i=i: x[:n, i], observations),
                actions[:length, i],
                reward if reward.ndim == 1 else reward.mean(axis=1),
                bool(len(ends)),
            )
        )
    return played


def _side_by_side(env: Any, played: Sequence[Episode], greedy: bool) -> Iterator[np.ndarray]:
    """One frame for each step of the longest episode; an episode that has ended keeps its last frame."""
    from PIL import Image, ImageDraw

    sources = [frames(env, episode) for episode in played]
    last: list[np.ndarray | None] = [None] * len(played)
    size: tuple[int, int] | None = None
    for step in range(max(len(episode.reward) for episode in played)):
        row = []
        for i, (source, episode) in enumerate(zip(sources, played, strict=True)):
            frame = next(source, None)
            last[i] = last[i] if frame is None else _captioned(frame, episode, step, greedy, Image, ImageDraw)
            row.append(last[i])
        height = max(one.shape[0] for one in row if one is not None)
        padded = [
            np.pad(one, ((0, height - one.shape[0]), (0, 0), (0, 0)), constant_values=255)
            for one in row
            if one is not None
        ]
        together = np.concatenate(padded, axis=1)
        if size is None:
            scale = min(1.0, _WIDEST / together.shape[1])
            # Most encoders require even sizes.
            size = tuple(max(2, int(side * scale) // 2 * 2) for side in together.shape[1::-1])  # type: ignore[assignment]
        assert size is not None
        yield (
            np.asarray(Image.fromarray(together).resize(size)) if together.shape[1::-1] != size else together
        )


def _captioned(
    frame: np.ndarray, episode: Episode, step: int, greedy: bool, image: Any, drawing: Any
) -> np.ndarray:
    """A frame with a caption: the step, and the return so far."""
    frame = _enlarged(frame)
    canvas = image.new("RGB", (frame.shape[1], frame.shape[0] + _CAPTION), "white")
    canvas.paste(image.fromarray(frame), (0, _CAPTION))
    total = float(episode.reward[: step + 1].sum())
    actions = "greedy" if greedy else "sampled"
    drawing.Draw(canvas).text((4, 3), f"{actions}, step {step + 1}, return {total:.4g}", fill="black")
    return np.asarray(canvas)


def _enlarged(frame: np.ndarray) -> np.ndarray:
    """Upscales a small frame by a whole factor."""
    times = max(1, 160 // max(1, min(frame.shape[:2])))
    return np.repeat(np.repeat(frame, times, axis=0), times, axis=1) if times > 1 else frame


def _gif(pictures: Iterator[np.ndarray], fps: int) -> bytes:
    from PIL import Image

    images = [Image.fromarray(picture).quantize(128) for picture in pictures]
    file = io.BytesIO()
    # Without `optimize`, equal frames are not merged: each frame is one step.
    images[0].save(
        file,
        "GIF",
        save_all=True,
        append_images=images[1:],
        duration=max(20, 1000 // fps),
        loop=0,
        optimize=False,
    )
    return file.getvalue()


def _write_mp4(path: Path, pictures: Iterator[np.ndarray], fps: int) -> None:
    first = next(pictures)
    size = f"{first.shape[1]}x{first.shape[0]}"
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"]
    made = ["-an", "-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "20", str(path)]
    program = [
        import_optional("imageio_ffmpeg", "an mp4").get_ffmpeg_exe(),
        "-y",
        "-loglevel",
        "error",
        *given,
        *made,
    ]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as ffmpeg:
        assert ffmpeg.stdin is not None and ffmpeg.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # its exit status explains it
            for picture in itertools.chain([first], pictures):
                ffmpeg.stdin.write(picture.tobytes())
        ffmpeg.stdin.close()
        said = ffmpeg.stderr.read().decode(errors="replace")
    if ffmpeg.returncode:
        raise FdgError(f"{path} cannot be written: {' '.join(said.split()) or 'ffmpeg failed'}")


def _page(env: Any, played: Sequence[Episode], fps: int, greedy: bool) -> bytes:
    viewers = [html(env, episode) for episode in played]
    if all(viewer is not None for viewer in viewers):
        if len(viewers) == 1:
            return str(viewers[0]).encode()
        inner = "".join(
            f'<iframe style="width:{100 // len(viewers)}%;height:96vh;border:0"'
            f' src="data:text/html;base64,{base64.b64encode(str(viewer).encode()).decode()}"></iframe>'
            for viewer in viewers
        )
    else:
        picture = base64.b64encode(_gif(_side_by_side(env, played, greedy), fps)).decode()
        inner = f'<img alt="episodes of {env.name}" src="data:image/gif;base64,{picture}">'
    title = f"{env.name}: {', '.join(f'{episode.total:.4g}' for episode in played)}"
    return f"<!doctype html><meta charset=utf-8><title>{title}</title>{inner}\n".encode()
