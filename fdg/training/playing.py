"""Records videos of trained agents: plays episodes, renders frames and writes them side by side."""

import base64
import contextlib
import errno
import io
import itertools
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs import features_and_mask
from envs.rendering import Episode, frames, html, import_optional
from envs.wrappers import unwrapped
from fdg.arguments import check_at_least
from fdg.errors import FdgError, listed
from fdg.files import check_writable, explain_os_errors, writing
from fdg.running.xla_options import jit
from fdg.training.deployed import Acting

FORMATS = (".mp4", ".gif", ".html")
MAX_STEPS = 1_000  # default limit on the steps of an episode
_SHORT_SIDE_PIXELS = 160  # frames whose shorter side has at most half as many pixels are enlarged
_CAPTION_PIXELS = 18  # height in pixels of the caption above each frame
_MAX_VIDEO_PIXELS = 1_600  # maximum width in pixels of a video
_MIN_FRAME_PIXELS = 16  # minimum width in pixels of one episode's frames


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
    """Plays a batch of episodes and writes them side by side as a video; returns its path.

    `path` ends in one of `FORMATS`; the last arguments are as for `Run.play`.
    """
    if path.suffix not in FORMATS:
        raise FdgError(f"{path}: give a video a file name that ends in {listed(FORMATS, 'or')}")
    check_at_least(1, episodes=episodes, fps=fps, max_steps=max_steps)
    if episodes > (limit := _MAX_VIDEO_PIXELS // _MIN_FRAME_PIXELS):
        raise FdgError(f"episodes={episodes}: at most {limit} fit side by side: give at most {limit}")
    check_writable(path)
    if path.suffix == ".mp4":
        import_optional("imageio_ffmpeg", "an mp4")
    recorded = play_episodes(algorithm, state, jax.random.key(seed), episodes, greedy, max_steps)
    if path.suffix == ".html":
        content = _html_page(algorithm.env, recorded, fps, greedy)
    else:
        encode = _encode_gif if path.suffix == ".gif" else _encode_mp4
        with explain_os_errors(path):
            content = encode(_joint_frames(algorithm.env, recorded, greedy), fps)
    with writing(path) as file:
        file.write(content)
    return path


def play_episodes(
    algorithm: Any, state: Any, key: jax.Array, episodes: int, greedy: bool, max_steps: int
) -> list[Episode]:
    """Plays `episodes` episodes of at most `max_steps` steps, in one XLA program if possible.

    Each result is one episode up to its first `done`, with what rendering needs.
    """
    env = algorithm.env
    limit = min(env.max_episode_steps or max_steps, max_steps)
    on_host = not hasattr(env, "single")
    source = getattr(unwrapped(env)[0], "source", None)
    if (record := getattr(source, "record", None)) is not None:  # Gymnasium's renderer
        seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
        agent = Acting(algorithm, state, greedy, seed)
        return record(lambda x, step: agent(x, start=step == 0), episodes, limit, seed)

    @jit
    def run(state, key):
        actor = algorithm.actor(state)
        reset_key, run_key = jax.random.split(key)
        env_state, observation = env.reset(jax.random.split(reset_key, episodes))

        def one_step(carry, time):
            env_state, observation, memory, starts = carry
            keys = jax.random.split(jax.random.fold_in(run_key, time), (2, episodes))
            action, memory = actor.act(memory, observation, starts, keys[0], greedy)
            next_state, step = env.step(keys[1], env_state, action)
            inner = () if on_host else env_state.inner
            features, _ = features_and_mask(observation)
            row = inner, features, action, step.reward, step.done
            return (next_state, step.observation, memory, step.done), row

        start = env_state, observation, actor.memory(episodes), jnp.ones(episodes, bool)
        return jax.lax.scan(one_step, start, jnp.arange(limit))[1]

    states, observations, actions, rewards, dones = jax.device_get(run(state, key))
    recorded = []
    for i in range(episodes):
        end_steps = np.flatnonzero(dones[:, i])
        length = int(end_steps[0]) + 1 if len(end_steps) else limit
        reward = rewards[:length, i]
        steps = () if on_host else range(length)
        recorded.append(
            Episode(
                [jax.tree.map(lambda x, t=t, i=i: x[t, i], states) for t in steps],
                jax.tree.map(lambda x, n=length, i=i: x[:n, i], observations),
                actions[:length, i],
                reward if reward.ndim == 1 else reward.mean(axis=1),
                bool(len(end_steps)),
            )
        )
    return recorded


def _joint_frames(env: Any, recorded: Sequence[Episode], greedy: bool) -> Iterator[np.ndarray]:
    """Yields one frame per step of the longest episode; finished episodes show their last frame."""
    from PIL import Image

    sources = [frames(env, episode) for episode in recorded]
    last_frames: list[np.ndarray | None] = [None] * len(recorded)
    size: tuple[int, int] | None = None
    for step in range(max(len(episode.reward) for episode in recorded)):
        for i, (source, episode) in enumerate(zip(sources, recorded, strict=True)):
            frame = next(source, None)
            if frame is not None:
                last_frames[i] = _add_caption(frame, episode, step, greedy)
        row = [frame for frame in last_frames if frame is not None]
        height = max(frame.shape[0] for frame in row)
        padded = [
            np.pad(frame, ((0, height - frame.shape[0]), (0, 0), (0, 0)), constant_values=255)
            for frame in row
        ]
        canvas = np.concatenate(padded, axis=1)
        if size is None:
            scale = min(1.0, _MAX_VIDEO_PIXELS / canvas.shape[1])
            # Most encoders require even widths and heights.
            size = tuple(max(2, int(side * scale) // 2 * 2) for side in canvas.shape[1::-1])  # type: ignore[assignment]
        assert size is not None
        yield (np.asarray(Image.fromarray(canvas).resize(size)) if canvas.shape[1::-1] != size else canvas)


def _add_caption(frame: np.ndarray, episode: Episode, step: int, greedy: bool) -> np.ndarray:
    """A frame, enlarged if it is small, with a caption: kind of actions, step, and return so far."""
    from PIL import Image, ImageDraw

    factor = max(1, _SHORT_SIDE_PIXELS // max(1, min(frame.shape[:2])))
    frame = frame.repeat(factor, axis=0).repeat(factor, axis=1)
    canvas = Image.new("RGB", (frame.shape[1], frame.shape[0] + _CAPTION_PIXELS), "white")
    canvas.paste(Image.fromarray(frame), (0, _CAPTION_PIXELS))
    total = float(episode.reward[: step + 1].sum())
    actions = "greedy" if greedy else "sampled"
    ImageDraw.Draw(canvas).text((4, 3), f"{actions}, step {step + 1}, return {total:.4g}", fill="black")
    return np.asarray(canvas)


def _encode_gif(pictures: Iterator[np.ndarray], fps: int) -> bytes:
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


def _encode_mp4(pictures: Iterator[np.ndarray], fps: int) -> bytes:
    """An MP4 video (H.264) of pictures `[H, W, 3]` uint8 with even H and W."""
    first_frame = next(pictures)
    size = f"{first_frame.shape[1]}x{first_frame.shape[0]}"
    input_options = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"]
    output_options = ["-an", "-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "20", "-f", "mp4"]
    program = import_optional("imageio_ffmpeg", "an mp4").get_ffmpeg_exe()
    with tempfile.NamedTemporaryFile() as file:
        command = [program, "-y", "-loglevel", "error", *input_options, *output_options, f"file:{file.name}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as ffmpeg:
            assert ffmpeg.stdin is not None and ffmpeg.stderr is not None
            # If ffmpeg has failed, its messages are read below; closing the pipe flushes it and fails again.
            with contextlib.suppress(BrokenPipeError), ffmpeg.stdin:
                for picture in itertools.chain([first_frame], pictures):
                    ffmpeg.stdin.write(picture.tobytes())
            messages = ffmpeg.stderr.read().decode(errors="replace")
        if ffmpeg.returncode:
            raise OSError(errno.EIO, " ".join(messages.split()) or "ffmpeg failed")
        return Path(file.name).read_bytes()


def _html_page(env: Any, recorded: Sequence[Episode], fps: int, greedy: bool) -> bytes:
    """A page with the library's interactive viewer of each episode; without such viewers, with a GIF."""
    viewers = [html(env, episode) for episode in recorded]
    if all(viewer is not None for viewer in viewers):
        if len(viewers) == 1:
            return str(viewers[0]).encode()
        inner = "".join(
            f'<iframe style="width:{100 // len(viewers)}%;height:96vh;border:0"'
            f' src="data:text/html;base64,{base64.b64encode(str(viewer).encode()).decode()}"></iframe>'
            for viewer in viewers
        )
    else:
        picture = base64.b64encode(_encode_gif(_joint_frames(env, recorded, greedy), fps)).decode()
        inner = f'<img alt="episodes of {env.name}" src="data:image/gif;base64,{picture}">'
    title = f"{env.name}: {', '.join(f'{episode.total:.4g}' for episode in recorded)}"
    return f"<!doctype html><meta charset=utf-8><title>{title}</title>{inner}\n".encode()
