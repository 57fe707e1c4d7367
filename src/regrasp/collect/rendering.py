"""Camera images of a MuJoCo scene, drawn cheaply enough for a software renderer.

Shadows, reflections, the sky and haze cost most of a frame in software and show a policy nothing; multisampling
doubles what is left. The scene's visual settings are the only thing that is changed.
"""

import os
import sys
from typing import Any

import numpy as np

from regrasp.collect.environment import CameraSpec, Observation
from regrasp.core.errors import ConfigError, nearest

FREE_CAMERAS: dict[str, dict[str, Any]] = {
    "front": {"lookat": (0.0, 0.68, 0.1), "distance": 0.75, "azimuth": 135.0, "elevation": -35.0},
}
"""Cameras that are not in the scene's own list: close enough to see the gripper's fingers and the object."""


def choose_backend() -> None:
    """Draw without a display (EGL, in software where there is no GPU) unless MUJOCO_GL says otherwise.

    MuJoCo reads the variable when it is imported, so this has no effect after that.
    """
    if "mujoco" not in sys.modules and not {"MUJOCO_GL", "DISPLAY"} & os.environ.keys():
        os.environ["MUJOCO_GL"] = "egl"


class SceneRenderer:
    """Draws the cameras of one scene."""

    def __init__(self, model: Any, data: Any, cameras: tuple[CameraSpec, ...]) -> None:  # noqa: ANN401
        """Prepare to draw ``cameras``, each one of the scene's own or of ``FREE_CAMERAS``.

        Raises:
            ConfigError: no such camera, or no way to draw on this machine.
        """
        import mujoco

        self._data, self._cameras = data, cameras
        model.vis.quality.offsamples = 0
        model.vis.quality.shadowsize = 0
        self._views = [self._view(mujoco, model, camera.name) for camera in cameras]
        sizes = {(camera.height, camera.width) for camera in cameras}
        try:
            self._renderers = {size: mujoco.Renderer(model, *size) for size in sizes}
        except Exception as error:  # each backend raises its own kind
            raise ConfigError(
                f"MuJoCo cannot draw images here with MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')!r} ({error}). "
                f"Install libegl1 or libosmesa6 and set MUJOCO_GL to egl or osmesa, or collect without cameras."
            ) from error
        flags: Any = vars(mujoco)["mjtRndFlag"]
        for renderer in self._renderers.values():
            for flag in ("SHADOW", "REFLECTION", "SKYBOX", "HAZE"):
                renderer.scene.flags[getattr(flags, f"mjRND_{flag}")] = False

    @staticmethod
    def _view(mujoco: Any, model: Any, name: str) -> Any:  # noqa: ANN401
        if name in FREE_CAMERAS:
            view = mujoco.MjvCamera()
            for key, value in FREE_CAMERAS[name].items():
                setattr(view, key, value)
            return view
        own = [model.camera(i).name for i in range(model.ncam)]
        if name not in own:
            known = [*FREE_CAMERAS, *own]
            raise ConfigError(f"The scene has no camera {name!r}.{nearest(name, known)} It has: {', '.join(known)}.")
        return name

    def render(self) -> Observation:
        """Return an image uint8 [H, W, 3] for each camera, keyed ``observation.images.NAME``."""
        images: dict[str, np.ndarray] = {}
        for camera, view in zip(self._cameras, self._views, strict=True):
            renderer = self._renderers[camera.height, camera.width]
            renderer.update_scene(self._data, camera=view)
            images[camera.key] = renderer.render()
        return images

    def close(self) -> None:
        """Free the drawing contexts."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers = {}
