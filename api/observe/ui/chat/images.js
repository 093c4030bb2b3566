// Images that are sent with a message, as data URLs: a request contains them, and so does the store.

const SIGNATURES = [
  ["image/png", /^\x89PNG\r\n\x1a\n/],
  ["image/jpeg", /^\xff\xd8\xff/],
  ["image/gif", /^GIF8[79]a/],
  ["image/webp", /^RIFF[^]{4}WEBP/],
];
const FILE_BYTES = 20 * 1024 * 1024;
// Each turn sends all images of the conversation again, so larger ones are scaled down.
const SENT_BYTES = 512 * 1024;
const LONGEST_SIDE = 2048; // px
const QUALITY = 0.9;

// The type of an image that models take, whatever the file is called; undefined for other files.
export async function imageType(file) {
  const start = new Uint8Array(await file.slice(0, 16).arrayBuffer());
  const text = String.fromCharCode(...start);
  return SIGNATURES.find(([, signature]) => signature.test(text))?.[0];
}

export async function readImage(file, type) {
  if (!type) throw new Error("is no image in PNG, JPEG, WebP or GIF");
  if (file.size > FILE_BYTES) throw new Error(`is larger than ${FILE_BYTES / 1024 / 1024} MiB`);
  const image = new Blob([file], { type });
  let bitmap;
  try {
    bitmap = await createImageBitmap(image);
  } catch {
    throw new Error("cannot be read as an image");
  }
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const isSmall = scale === 1 && image.size <= SENT_BYTES;
  const sent = isSmall ? image : await redrawn(bitmap, scale);
  bitmap.close();
  return dataUrl(sent);
}

function redrawn(bitmap, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

// The element that shows an image.
export function picture({ name, image }) {
  const shown = document.createElement("img");
  shown.src = image;
  shown.alt = name;
  shown.title = name;
  return shown;
}
